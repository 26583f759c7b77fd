//! A profile as a timeline in the trace event format, which Perfetto and chrome://tracing open.
//!
//! Times are microseconds since the profile began, exact to the nanosecond: seconds since 1970 would not fit a double. The
//! slices of a track nest: kernels that overlap on one stream are drawn on further tracks, because Perfetto corrupts
//! tracks whose slices overlap in part.

mod check;
mod events;

pub use check::{Fault, Seen, check};

use crate::model::Profile;
use crate::{Result, write};
use events::Events;
use flate2::{Compression, write::GzEncoder};
use std::io::Write;
use std::path::Path;

/// The timeline as JSON.
pub fn json(profile: &Profile) -> String {
    let mut events = Events::default();
    for (number, phase) in profile.phases.iter().enumerate() {
        events.phase(number, phase);
    }
    events.into_json(profile)
}

/// Writes the timeline to a file, compressed if its name ends in `.gz`. Returns the bytes written.
///
/// # Errors
/// If the file cannot be written.
pub fn save(profile: &Profile, path: &Path) -> Result<usize> {
    let json = json(profile);
    let bytes = match path.extension().is_some_and(|extension| extension == "gz") {
        true => compressed(json.as_bytes()),
        false => json.into_bytes(),
    };
    write(path, &bytes)?;
    Ok(bytes.len())
}

fn compressed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(6));
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.expect("memory takes all that is written")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{overlapping, sample};
    use flate2::read::GzDecoder;
    use std::io::Read;

    #[test]
    fn a_timeline_holds_what_happened_and_its_slices_nest() {
        let text = json(&sample());
        let seen = check(&text).unwrap();
        let calls: usize = sample().phases.iter().map(|phase| phase.calls.len()).sum();
        assert_eq!(seen.slices_of("op"), calls);
        assert_eq!(seen.slices_of("step"), 5);
        assert_eq!(seen.slices_of("layer"), 15);
        assert_eq!(seen.slices_of("request"), 4);
        // Of each of the 15 loops, what two threads did.
        assert_eq!(seen.slices_of("work"), 30);
        assert!(seen.slices_of("wait") > 0 && seen.counters > 0);
        for track in ["main", "warpsmith-2-1", "request 0", "phases"] {
            assert!(seen.tracks.iter().any(|name| name == track), "no {track} in {:?}", seen.tracks);
        }
        for part in [r#""displayTimeUnit":"ns""#, r#""baseTimeNanoseconds":"#, r#""of limit":"60 %""#] {
            assert!(text.contains(part), "no {part}");
        }
    }

    #[test]
    fn kernels_that_overlap_on_a_stream_are_on_two_tracks_and_calls_point_to_them() {
        let text = json(&overlapping());
        let seen = check(&text).unwrap();
        assert_eq!((seen.slices_of("kernel"), seen.flows), (3, 2));
        let of_stream = seen.tracks.iter().filter(|name| name.starts_with("stream 7")).count();
        assert_eq!(of_stream, 2, "{:?}", seen.tracks);
    }

    #[test]
    fn a_file_whose_name_says_so_is_compressed() {
        let folder = tempfile::tempdir().unwrap();
        let [plain, packed] = ["t.json", "t.json.gz"].map(|name| folder.path().join(name));
        let profile = sample();
        let [long, short] = [&plain, &packed].map(|path| save(&profile, path).unwrap());
        assert!(short * 4 < long, "{short} of {long}");
        let mut text = String::new();
        GzDecoder::new(&std::fs::read(&packed).unwrap()[..]).read_to_string(&mut text).unwrap();
        assert_eq!(text, std::fs::read_to_string(&plain).unwrap());
        let nowhere = folder.path().join("no/such/folder.json");
        let error = save(&profile, &nowhere).unwrap_err().to_string();
        assert!(error.contains("folder.json"), "{error}");
    }
}
