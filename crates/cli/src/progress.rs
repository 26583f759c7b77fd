//! Progress output: on standard error, and only if that is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use warpsmith::jit::{CompileEvent, observe_compilation};
use warpsmith_engine::hub::Download;
use warpsmith_engine::models::LoadProgress;

fn bar(template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// The weights of a model while they are loaded.
pub struct Loading(ProgressBar);

impl Loading {
    pub fn new(what: &str) -> Loading {
        let bar = bar("{spinner} {msg} {bar:30} {percent}% {elapsed}");
        bar.set_message(format!("loading {what}"));
        Loading(bar)
    }

    pub fn show(&self, progress: LoadProgress) {
        self.0.set_length(progress.total as u64);
        self.0.set_position(progress.done as u64);
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Files while they are downloaded, one after the other.
#[derive(Default)]
pub struct Downloading(Option<(String, ProgressBar)>);

impl Downloading {
    pub fn show(&mut self, download: Download<'_>) {
        if self.0.as_ref().is_none_or(|(file, _)| file != download.file) {
            self.finish();
            let bar = bar("{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} (eta {eta})");
            bar.set_message(format!("downloading {}", download.file));
            self.0 = Some((download.file.into(), bar));
        }
        if let Some((_, bar)) = &self.0 {
            bar.set_length(download.total);
            bar.set_position(download.bytes);
        }
    }

    fn finish(&mut self) {
        if let Some((_, bar)) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Downloading {
    fn drop(&mut self) {
        self.finish();
    }
}

/// From now on, shows which kernel is being compiled and how many were.
pub fn show_compilation() {
    let (count, hidden) = (AtomicU64::new(0), ProgressBar::hidden());
    let shown = std::sync::Mutex::new(hidden);
    observe_compilation(move |event| {
        let mut shown = shown.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match event {
            CompileEvent::Started { kernel } => {
                let number = count.fetch_add(1, Ordering::Relaxed) + 1;
                *shown = bar("{spinner} {msg} {elapsed}");
                shown.set_message(format!("compiling kernel {number} for the first time: {kernel}"));
            }
            CompileEvent::Ended { .. } => shown.finish_and_clear(),
        }
    });
}
