//! Profiles of Python code.

use crate::errors::OrRaise;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use warpsmith::profile::{self, Kind, Records, Session, Span};
use warpsmith::{Device, Result};
use warpsmith_profile::capture::{Limits, about, single};
use warpsmith_profile::summary::Summary;
use warpsmith_profile::{Profile, memory_peaks, report, text, trace};

/// A profile that is being recorded, and then what was recorded.
#[pyclass]
pub struct Recording {
    title: String,
    session: Mutex<Option<Session>>,
    records: Mutex<Option<Records>>,
    /// Made when it is first asked for: the machine's limits are measured then.
    profile: OnceLock<Profile>,
}

#[pymethods]
impl Recording {
    /// Begins to record.
    #[new]
    fn new(py: Python<'_>, title: String) -> PyResult<Recording> {
        let session = Session::start().or_raise(py)?;
        Ok(Recording {
            title,
            session: Mutex::new(Some(session)),
            records: Mutex::default(),
            profile: OnceLock::new(),
        })
    }

    /// Ends it, when GPUs have done what they were given. A second time does nothing.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| {
            let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(session) = session {
                *self.records.lock().unwrap_or_else(PoisonError::into_inner) = Some(session.stop());
            }
        });
    }

    /// The report for a terminal.
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, text::report)
    }

    /// All tables as JSON.
    fn json(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |profile| {
            let mut phases = profile.phases.iter().map(|phase| {
                serde_json::json!({
                    "about": profile.about, "clock": phase.clock, "notes": phase.notes,
                    "summary": Summary::of(phase), "memory": memory_peaks(phase),
                })
            });
            phases.next_back().unwrap_or_default().to_string()
        })
    }

    /// Writes the timeline.
    fn trace(&self, py: Python<'_>, path: PathBuf) -> PyResult<usize> {
        self.with(py, |profile| trace::save(profile, &path))?
            .map_err(|error| PyOSError::new_err(error.to_string()))
    }

    /// Writes the page.
    fn report(&self, py: Python<'_>, path: PathBuf) -> PyResult<usize> {
        self.with(py, |profile| report::save(profile, &path))?
            .map_err(|error| PyOSError::new_err(error.to_string()))
    }
}

impl Recording {
    fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&Profile) -> R + Send) -> PyResult<R> {
        self.stop(py);
        let made = py.detach(|| -> Result<R> {
            if self.profile.get().is_none() {
                let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
                // Measured before the records are taken, so that they stay if that fails.
                let limits = Limits::measure(device_of(records.as_ref())?)?;
                let about = about(self.title.clone(), "Python: with warpsmith.profile()".into(), &limits);
                let records = records.take().unwrap_or_default();
                let _ = self.profile.set(single(about, "profile", records, &limits));
            }
            Ok(work(self.profile.get_or_init(Profile::default)))
        });
        made.or_raise(py)
    }
}

/// The device whose limits matter: the GPU that was used, or else the CPU.
fn device_of(records: Option<&Records>) -> Result<Device> {
    let mut devices =
        records.into_iter().flat_map(|records| &records.calls).map(|call| call.form.device.as_str());
    devices.find(|device| *device != "cpu").unwrap_or("cpu").parse()
}

/// A named span of time, from `__enter__` to `__exit__`.
#[pyclass]
pub struct NamedSpan {
    name: String,
    open: Mutex<Option<Span>>,
}

#[pymethods]
impl NamedSpan {
    #[new]
    fn new(name: String) -> NamedSpan {
        NamedSpan { name, open: Mutex::default() }
    }

    fn __enter__(&self) {
        let span = profile::span(Kind::User, || self.name.clone());
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(span);
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _value: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
