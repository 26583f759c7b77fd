//! Ctrl-C while an answer is written: the first stops the answer, the second the program.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Signals since the answer began.
static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// The exit status of a program that was interrupted.
const INTERRUPTED: i32 = 128 + libc::SIGINT;

extern "C" fn count(_: libc::c_int) {
    if SIGNALS.fetch_add(1, Ordering::Relaxed) > 0 {
        // SAFETY: `_exit` may be called in a signal handler.
        unsafe { libc::_exit(INTERRUPTED) };
    }
}

/// While it lives, Ctrl-C is counted instead of ending the program.
pub struct Interrupts {
    before: libc::sighandler_t,
}

impl Interrupts {
    pub fn catch() -> Interrupts {
        SIGNALS.store(0, Ordering::Relaxed);
        let handler = count as extern "C" fn(libc::c_int);
        // SAFETY: the handler does only what a signal handler may: it counts in an atomic, or ends the process.
        let before = unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
        Interrupts { before }
    }

    /// Whether there was one.
    pub fn any(&self) -> bool {
        SIGNALS.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        // SAFETY: this is what was there before.
        unsafe { libc::signal(libc::SIGINT, self.before) };
    }
}
