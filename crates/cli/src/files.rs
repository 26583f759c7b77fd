//! Files that others read.

use std::path::Path;
use warpsmith::{Error, Result};

/// Writes a file aside and renames it into place, so that readers see the old file or the new one, whole. Other kinds
/// of file, such as pipes, are written directly.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    // A symbolic link is kept and points to the new file.
    let target = path.canonicalize().unwrap_or_else(|_| path.into());
    let write = |to: &Path| std::fs::write(to, bytes).map_err(|error| Error::io(path, "write", &error));
    let Some(name) = target.file_name() else { return write(&target) };
    if target.exists() && !target.is_file() {
        return write(&target);
    }
    let aside = target.with_file_name(format!(".{}.tmp-{}", name.to_string_lossy(), std::process::id()));
    let renamed = write(&aside).and_then(|()| {
        std::fs::rename(&aside, &target).map_err(|error| Error::io(path, "rename into place", &error))
    });
    renamed.inspect_err(|_| {
        let _ = std::fs::remove_file(&aside);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_and_nothing_is_left_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("out.bin"), folder.path().join("link"));
        std::os::unix::fs::symlink("out.bin", &link).unwrap();
        replace(&file, b"old").unwrap();
        // Readers of the old file keep reading it.
        let mut reader = std::fs::File::open(&file).unwrap();
        replace(&link, b"new").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
        assert_eq!(std::io::read_to_string(&mut reader).unwrap(), "old");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_no_file_is_not_replaced_by_one() {
        replace(Path::new("/dev/null"), b"nothing").unwrap();
        assert!(!Path::new("/dev/null").is_file());
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), &folder.path().join("no/such/folder")] {
            assert!(matches!(replace(path, b"x"), Err(Error::Io { .. })));
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
