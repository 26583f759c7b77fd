//! The order of work on a device.

use super::Device;
#[cfg(not(feature = "cuda"))]
use super::no_cuda_feature;
use crate::error::Result;

/// An order of execution on one device. Work on the host is done when a call returns.
///
/// Calls may use tensors of any stream: the library makes a stream wait for the others whose work with the same memory must
/// come first. Events are for ordering anything else.
///
/// ```
/// use warpsmith::{Device, Stream};
/// let (first, second) = (Stream::new(Device::best())?, Stream::new(Device::best())?);
/// let done = first.record()?;
/// second.wait(&done)?; // work enqueued on `second` from here on runs after what was enqueued on `first` so far
/// done.synchronize()?; // and so does the host
/// # Ok::<(), warpsmith::Error>(())
/// ```
#[derive(Clone)]
pub enum Stream {
    /// The calling thread and its pool.
    Host,
    /// A CUDA stream, own or foreign.
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::Stream),
}

impl Stream {
    /// A new stream on `device`.
    pub fn new(device: Device) -> Result<Stream> {
        match device {
            Device::Cpu => Ok(Stream::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(ordinal) => {
                Ok(Stream::Cuda(crate::cuda::Stream::new(crate::cuda::Context::get(ordinal)?)?))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(no_cuda_feature()),
        }
    }

    /// The device the stream belongs to.
    pub fn device(&self) -> Device {
        match self {
            Stream::Host => Device::Cpu,
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => Device::Cuda(stream.context().ordinal()),
        }
    }

    /// Waits for the work enqueued so far.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Stream::Host => Ok(()),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.synchronize(),
        }
    }

    /// Marks the present end of the stream.
    pub fn record(&self) -> Result<Event> {
        match self {
            Stream::Host => Ok(Event::Host),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => {
                let event = crate::cuda::Event::new(stream.context(), false)?;
                event.record(stream)?;
                Ok(Event::Cuda(event))
            }
        }
    }

    /// Makes all later work of the stream wait until `event` is reached. On a GPU the host does not wait.
    pub fn wait(&self, event: &Event) -> Result<()> {
        match (self, event) {
            (_, Event::Host) => Ok(()),
            #[cfg(feature = "cuda")]
            (Stream::Host, Event::Cuda(event)) => event.synchronize(),
            #[cfg(feature = "cuda")]
            (Stream::Cuda(stream), Event::Cuda(event)) => stream.wait(event),
        }
    }

    /// Makes all later work of the stream wait for everything that `other` was given so far.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        self.wait(&other.record()?)
    }

    /// Bytes of workspace that the stream holds for its calls and the graphs captured on it; on the host it is the threads'.
    pub fn workspace_bytes(&self) -> usize {
        match self {
            Stream::Host => 0,
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.workspace_bytes(),
        }
    }
}

/// A mark in a stream.
pub enum Event {
    /// In the order of the host, which is past it.
    Host,
    /// In a CUDA stream.
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::Event),
}

impl Event {
    /// Whether the mark is reached.
    pub fn is_reached(&self) -> Result<bool> {
        match self {
            Event::Host => Ok(true),
            #[cfg(feature = "cuda")]
            Event::Cuda(event) => event.query(),
        }
    }

    /// Waits until the mark is reached, and for nothing else.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Event::Host => Ok(()),
            #[cfg(feature = "cuda")]
            Event::Cuda(event) => event.synchronize(),
        }
    }
}
