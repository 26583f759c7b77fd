//! Kernels that are compiled while Python prepares their first call.

use super::form::Form;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use warpsmith::cuda::Context;
use warpsmith::jit::Arch;
use warpsmith_fuse::Memory;
use warpsmith_fuse::cuda::CudaCompiled;

/// Threads that may still be compiling.
static RUNNING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(vec![]);

/// Compiles what a call with such tensors needs, in a thread of its own. Who calls meanwhile waits for the same compilation.
/// Errors are not reported: the call runs into them again.
pub fn begin(cuda: Arc<CudaCompiled>, ordinal: u32, inputs: Vec<Form>, outputs: Vec<Form>) {
    let Ok(context) = Context::get(ordinal) else { return };
    let props = context.info();
    let arch = Arch::for_device(props.major as u8, props.minor as u8);
    let compile = move || {
        drop(cuda.compile(arch, &memories(&inputs), &memories(&outputs)));
    };
    // Without a thread to spare, the call compiles.
    if let Ok(handle) = std::thread::Builder::new().name("fuse-compile".into()).spawn(compile) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|other| !other.is_finished());
        running.push(handle);
    }
}

/// Of addresses the alignment alone counts here.
fn memories(forms: &[Form]) -> Vec<Memory<'_>> {
    forms.iter().map(|form| form.memory(0)).collect()
}

/// Waits for all of them.
pub fn finish() {
    let running = std::mem::take(&mut *RUNNING.lock().unwrap_or_else(PoisonError::into_inner));
    for handle in running {
        // One that panicked has said so.
        drop(handle.join());
    }
}
