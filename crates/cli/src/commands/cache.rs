//! `warpsmith cache`: the kernels compiled on this machine.

use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;
use warpsmith::jit::cache::{Cache, Entry};
use warpsmith::{Error, Result, env};

/// Show or clear the cache of compiled kernels
///
/// Kernels compiled at run time are kept in WARPSMITH_CACHE_DIR, or else in `warpsmith` under XDG_CACHE_HOME or
/// ~/.cache. Clearing is always safe: kernels are compiled again when they are needed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith cache ls
  warpsmith cache clear --yes";

#[derive(clap::Subcommand)]
enum Command {
    /// List the compiled kernels
    Ls {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove the compiled kernels (tuned choices stay)
    Clear {
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let cache = Cache::default_location();
    let root = cache.root().map(Path::to_path_buf).ok_or_else(|| Error::Unavailable {
        what: "the kernel cache".into(),
        why: cache.warning().unwrap_or_default(),
        fix: format!("Set {} to a folder of yours", env::CACHE_DIR),
    })?;
    match args.command {
        Command::Ls { json } => list(&cache, &root, json),
        Command::Clear { yes } => clear(&cache, &root, yes)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list(cache: &Cache, root: &Path, json: bool) {
    let entries = cache.entries();
    if json {
        let seconds =
            |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let describe = |entry: &Entry| {
            json!({
                "kernel": entry.kernel,
                "arch": entry.id.arch.to_string(),
                "nvrtc": format!("{}.{}", entry.id.nvrtc.0, entry.id.nvrtc.1),
                "key": entry.id.key.to_string(),
                "bytes": entry.bytes,
                "modified": seconds(entry.modified),
                "path": entry.path,
            })
        };
        println!("{:#}", entries.iter().map(describe).collect::<Value>());
        return;
    }
    let width = entries.iter().map(|entry| entry.kernel.len()).max().unwrap_or(0);
    for entry in &entries {
        println!(
            "{:width$}  {:8}  NVRTC {}.{}  {:>8} bytes  {}",
            entry.kernel,
            entry.id.arch.to_string(),
            entry.id.nvrtc.0,
            entry.id.nvrtc.1,
            entry.bytes,
            &entry.id.key.to_string()[..16],
        );
    }
    println!("{}", summary(&entries, root));
    if let Some(warning) = cache.warning() {
        eprintln!("warning: {warning}");
    }
}

fn clear(cache: &Cache, root: &Path, yes: bool) -> Result<()> {
    if !yes && !confirmed(&summary(&cache.entries(), root))? {
        println!("nothing was removed");
        return Ok(());
    }
    let cleared = cache.clear()?;
    println!(
        "removed {} files, {:.1} MB, from {}",
        cleared.files,
        cleared.bytes as f64 / 1e6,
        root.display()
    );
    Ok(())
}

fn confirmed(what: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(Error::parse("cache clear", "--yes, as there is no terminal to ask on", "no --yes"));
    }
    print!("{what}. Remove them? [y/N] ");
    let mut answer = String::new();
    let asked = std::io::stdout().flush().and_then(|()| std::io::stdin().read_line(&mut answer));
    asked.map_err(|error| Error::io("the terminal", "ask", &error))?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn summary(entries: &[Entry], root: &Path) -> String {
    let bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
    format!("{} kernels, {:.1} MB, in {}", entries.len(), bytes as f64 / 1e6, root.display())
}
