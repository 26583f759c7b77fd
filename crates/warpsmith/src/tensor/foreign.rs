//! Tensors in foreign memory: a framework's, a capsule's, a file's.

use super::storage::Storage;
use super::{DType, Layout, Shape, Tensor};
use crate::device::{Device, Stream};
use crate::error::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Memory of somebody else, to be used as a tensor.
pub struct Foreign {
    /// Address of the first element, on the device.
    pub address: usize,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides.
    pub layout: Layout,
    /// Where it is.
    pub device: Device,
    /// The stream in whose order its owner makes and frees it, if it is on a GPU and has one. First uses on other streams wait
    /// for it, and it waits for them before the memory is given back.
    pub stream: Option<Stream>,
    /// Whether it must not be written.
    pub read_only: bool,
}

impl Tensor {
    /// A tensor in foreign memory. `deleter` is called exactly once, on any thread, after the last handle is gone and
    /// the last work on any stream that uses the memory is done (or, with a stream of its owner's, ordered before
    /// whatever that is given next).
    ///
    /// # Safety
    /// Until the deleter is called, the address must be good for reads of the layout's span (and writes, unless read-only), and
    /// others may write there, or read while it is written, only in the order of `stream`; on the host not at all.
    pub unsafe fn from_foreign(memory: Foreign, deleter: impl FnOnce() + Send + 'static) -> Result<Tensor> {
        let Foreign { address, dtype, layout, device, stream, read_only } = memory;
        if layout.numel() > 0 && !address.is_multiple_of(dtype.size()) {
            let expected = format!("a multiple of {} bytes", dtype.size());
            return Err(Error::argument(
                "Tensor::from_foreign",
                "address",
                expected,
                format!("{address:#x}"),
            ));
        }
        if let Some(stream) = stream.as_ref().filter(|stream| stream.device() != device) {
            let (expected, got) = (format!("a stream of {device}"), stream.device().to_string());
            return Err(Error::argument("Tensor::from_foreign", "stream", expected, got));
        }
        let len = layout.span() * dtype.size();
        // SAFETY: passed on.
        let storage =
            unsafe { Storage::foreign(address, len, device, stream.as_ref(), read_only, Box::new(deleter)) }?;
        Ok(Tensor { storage: Arc::new(storage), offset: 0, dtype, layout })
    }
}

/// A file in memory, mapped or read, whose parts can be used as read-only tensors without copying them. The memory lives as
/// long as one of them.
pub struct MappedFile {
    storage: Arc<Storage>,
    /// What is mapped.
    mapped: Option<(PathBuf, File)>,
}

impl MappedFile {
    /// Reads a whole file into its own memory: later changes of the file have no effect.
    ///
    /// # Errors
    /// If the file cannot be read, or there is no memory for it.
    pub fn read(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let (file, len) = open(path)?;
        let mut storage = Storage::allocate(len, &Stream::Host)?;
        // SAFETY: new memory of this length, of zeros, which nobody else has.
        let bytes = unsafe { std::slice::from_raw_parts_mut(storage.address() as *mut u8, len) };
        let read = (&file).read_exact(bytes);
        read.map_err(|error| Error::io(path, "reading", &error))?;
        storage.make_constant()?;
        Ok(MappedFile { storage: Arc::new(storage), mapped: None })
    }

    /// Maps a whole file. Nothing is read before it is used.
    ///
    /// # Safety
    /// As long as this or one of its tensors lives, nobody may write to the file or shorten it, in this process or
    /// another. Reading what was cut off ends the process (SIGBUS); what is written changes memory that others believe
    /// constant. Replacing the file under its name is safe: the mapping keeps the old one. [`MappedFile::read`] has no
    /// such condition, and [`MappedFile::check_length`] finds most problems before they end the process.
    ///
    /// # Errors
    /// If the file cannot be opened or mapped.
    pub unsafe fn map(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let failed = |doing: &str, error: &std::io::Error| Error::io(path, doing, error);
        let (file, len) = open(path)?;
        if len == 0 {
            let storage = Arc::new(Storage::allocate(0, &Stream::Host)?);
            return Ok(MappedFile { storage, mapped: None });
        }
        // SAFETY: a new private mapping at an address of the system's choice; the descriptor may be closed afterwards.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(failed("mapping", &std::io::Error::last_os_error()));
        }
        let start = start as usize;
        let unmap = move || {
            // SAFETY: mapped above with this length, and no tensor uses it any more.
            let failed = unsafe { libc::munmap(start as *mut libc::c_void, len) } != 0;
            debug_assert!(!failed, "{}", std::io::Error::last_os_error());
        };
        // SAFETY: the mapping is private and read-only, and lives until it is unmapped; the caller sees to the file.
        let storage = unsafe { Storage::foreign(start, len, Device::Cpu, None, true, Box::new(unmap)) }?;
        Ok(MappedFile { storage: Arc::new(storage), mapped: Some((path.into(), file)) })
    }

    /// Checks that the file is still as long as when it was mapped. Call it before using much of the file: it costs a
    /// system call.
    ///
    /// # Errors
    /// [`Error::Io`] if it has become shorter.
    pub fn check_length(&self) -> Result<()> {
        let Some((path, file)) = &self.mapped else { return Ok(()) };
        let now = file.metadata().map_err(|error| Error::io(path, "reading its size", &error))?.len();
        if now >= self.len() as u64 {
            return Ok(());
        }
        let what = format!("it was {} bytes long when it was mapped, and has become {now}", self.len());
        Err(Error::Io { path: path.clone(), what })
    }

    /// Size of the file in bytes.
    pub fn len(&self) -> usize {
        self.storage.len()
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        if self.is_empty() {
            return &[];
        }
        // SAFETY: the mapping is as long, is not written, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.storage.address() as *const u8, self.len()) }
    }

    /// Returns the memory of a mapped file to the system: parts that are used again are read from the file again. For
    /// files whose contents were converted.
    pub fn release(&self) {
        if self.mapped.is_some() {
            // SAFETY: the mapping is a file's, private and never written: pages that are dropped come back as they
            // were. It is a hint: everything works without it.
            unsafe {
                libc::madvise(self.storage.address() as *mut libc::c_void, self.len(), libc::MADV_DONTNEED)
            };
        }
    }

    /// The elements that lie `offset` bytes from the start of the file on, in row-major order.
    ///
    /// # Errors
    /// If they do not lie in the file, or not at a multiple of their size.
    pub fn tensor(&self, offset: usize, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let layout = Layout::contiguous(Shape::new(shape)?);
        let bytes = layout.numel() * dtype.size();
        if offset.checked_add(bytes).is_none_or(|end| end > self.len()) {
            let expected = format!("a tensor inside the file's {} bytes", self.len());
            let got = format!("{bytes} bytes at {offset}");
            return Err(Error::argument("MappedFile::tensor", "offset", expected, got));
        }
        if bytes > 0 && !(self.storage.address() + offset).is_multiple_of(dtype.size()) {
            let expected = format!("a multiple of {} bytes", dtype.size());
            return Err(Error::argument("MappedFile::tensor", "offset", expected, offset.to_string()));
        }
        Ok(Tensor { storage: self.storage.clone(), offset, dtype, layout })
    }
}

/// A file and its length.
fn open(path: &Path) -> Result<(File, usize)> {
    let failed = |doing: &str, error: &std::io::Error| Error::io(path, doing, error);
    let file = File::open(path).map_err(|error| failed("opening", &error))?;
    let len = file.metadata().map_err(|error| failed("reading its size", &error))?.len();
    let too_large = || failed("opening", &std::io::ErrorKind::FileTooLarge.into());
    Ok((file, usize::try_from(len).map_err(|_| too_large())?))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A tensor over a vector that counts how often it is given back.
    fn foreign(data: Vec<f32>, shape: &[usize], read_only: bool, deleted: &Arc<AtomicUsize>) -> Tensor {
        let deleted = deleted.clone();
        let memory = Foreign {
            address: data.as_ptr() as usize,
            dtype: DType::F32,
            layout: Layout::contiguous(Shape::new(shape).unwrap()),
            device: Device::Cpu,
            stream: None,
            read_only,
        };
        let give_back = move || {
            drop(data);
            deleted.fetch_add(1, Ordering::SeqCst);
        };
        // SAFETY: the vector lives in the deleter, and nobody else has it.
        unsafe { Tensor::from_foreign(memory, give_back) }.unwrap()
    }

    #[test]
    fn memory_of_others_is_given_back_once_after_the_last_handle() {
        let deleted = Arc::new(AtomicUsize::new(0));
        let tensor = foreign(vec![1.0, 2.0, 3.0, 4.0], &[2, 2], false, &deleted);
        let part = tensor.narrow(0, 1, 1).unwrap();
        drop(tensor);
        assert_eq!(deleted.load(Ordering::SeqCst), 0);
        assert_eq!(part.to_vec::<f32>().unwrap(), [3.0, 4.0]);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn({
                    let part = part.clone();
                    move || part.to_vec::<f32>().unwrap()
                })
            })
            .collect();
        drop(part);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [3.0, 4.0]);
        }
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn read_only_memory_is_not_written() {
        let deleted = Arc::new(AtomicUsize::new(0));
        let mut tensor = foreign(vec![1.0; 4], &[4], true, &deleted);
        let error = tensor.write(0, &[2f32], &Stream::Host).unwrap_err().to_string();
        assert!(error.contains("read-only"), "{error}");
        let x = Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
        let error =
            crate::ops::Activation::relu(&x).run_into(&mut tensor, &Stream::Host).unwrap_err().to_string();
        assert!(error.contains("`out`") && error.contains("read-only"), "{error}");
    }

    #[test]
    fn parts_of_a_file_are_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let numbers: Vec<u8> = [0.5f32, -1.0, 8.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        std::fs::write(&path, [&[7u8; 8][..], &numbers].concat()).unwrap();
        for read in [false, true] {
            // SAFETY: the file is only removed, which leaves what is mapped.
            let open = || if read { MappedFile::read(&path) } else { unsafe { MappedFile::map(&path) } };
            let file = open().unwrap();
            let tensor = file.tensor(8, &[3], DType::F32).unwrap();
            assert_eq!((file.len(), file.bytes()[7]), (20, 7));
            for (offset, count) in [(12, 3), (6, 1), (usize::MAX, 1), (20, 1)] {
                let error = file.tensor(offset, &[count], DType::F32).unwrap_err();
                assert!(matches!(error, Error::Argument { .. }), "{error}");
            }
            assert!(file.tensor(20, &[0], DType::F32).is_ok());
            file.check_length().unwrap();
            drop(file);
            std::fs::rename(&path, folder.path().join("gone")).unwrap();
            assert_eq!(tensor.to_vec::<f32>().unwrap(), [0.5, -1.0, 8.0]);
            assert!(matches!(open(), Err(Error::Io { .. })));
            std::fs::rename(folder.path().join("gone"), &path).unwrap();
        }
    }

    #[test]
    fn a_file_that_has_become_shorter_is_noticed_and_what_was_read_of_it_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, [3u8; 10_000]).unwrap();
        // SAFETY: of what is cut off below nothing is used.
        let mapped = unsafe { MappedFile::map(&path) }.unwrap();
        let read = MappedFile::read(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let error = mapped.check_length().unwrap_err().to_string();
        assert!(error.contains("10000 bytes") && error.contains("has become 5000"), "{error}");
        read.check_length().unwrap();
        assert_eq!(read.tensor(0, &[10_000], DType::U8).unwrap().to_vec::<u8>().unwrap(), [3; 10_000]);
    }
}
