//! A small hub: answers the questions that programs ask the Hugging Face hub, from folders of this machine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// The token that private repositories want.
pub const TOKEN: &str = "hf_secret";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Repositories by name, with their files.
#[derive(Default)]
pub struct Content {
    repositories: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
}

impl Content {
    /// Adds files of a folder to a repository, under the same names.
    pub fn add(mut self, repository: &str, folder: &Path, files: &[&str]) -> Content {
        for file in files {
            self = self.add_file(repository, file, std::fs::read(folder.join(file)).unwrap());
        }
        self
    }

    /// Adds a file.
    pub fn add_file(mut self, repository: &str, file: &str, bytes: Vec<u8>) -> Content {
        self.repositories.entry(repository.into()).or_default().insert(file.into(), bytes);
        self
    }
}

/// What a hub does wrong.
#[derive(Default)]
pub struct Faults {
    /// It is too busy to send the file of this name, as many times.
    pub busy: Option<(String, usize)>,
    /// It sends whole files, whatever part is asked for.
    pub ignores_range: bool,
}

/// A hub that runs until the process ends.
pub struct Server {
    /// Its address.
    pub endpoint: String,
    /// What it does wrong.
    pub faults: Arc<Mutex<Faults>>,
    log: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub fn start(content: Content) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let faults = Arc::new(Mutex::new(Faults::default()));
        let (seen, wrong) = (log.clone(), faults.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that hangs up is none of our business.
                let _ = answer(stream, &content, &seen, &mut wrong.lock().unwrap());
            }
        });
        Server { endpoint, faults, log }
    }

    /// The paths that were asked for since the last time.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }
}

/// As for real files: made from what the file holds.
pub fn tag(bytes: &[u8]) -> String {
    let tag = bytes.iter().fold(bytes.len() as u64, |sum, &byte| sum.rotate_left(5) ^ u64::from(byte));
    format!("{tag:x}")
}

fn answer(
    stream: TcpStream,
    content: &Content,
    log: &Mutex<Vec<String>>,
    faults: &mut Faults,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().transpose()?.unwrap_or_default();
    let path = first.split(' ').nth(1).unwrap_or_default().to_string();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_string());
    }
    log.lock().unwrap().push(path.clone());
    let allowed = headers.get("authorization").is_some_and(|given| *given == format!("Bearer {TOKEN}"));
    let mut range = headers.get("range");
    // The first byte is asked for to learn about the file.
    let is_download = range.is_some_and(|range| range != "bytes=0-0");
    if is_download && faults.ignores_range {
        range = None;
    }
    let (mut status, extra, mut body) = respond(&path, range, allowed, content);
    if let Some((file, left @ 1..)) = &mut faults.busy
        && is_download
        && path.ends_with(file.as_str())
    {
        *left -= 1;
        (status, body) = ("503 Service Unavailable".into(), Vec::new());
    }
    let mut stream = stream;
    let length = body.len();
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{extra}\r\n")?;
    stream.write_all(&body)
}

/// Status, headers and body.
fn respond(
    path: &str,
    range: Option<&String>,
    allowed: bool,
    content: &Content,
) -> (String, String, Vec<u8>) {
    let fail = |status: &str| (status.to_string(), String::new(), Vec::new());
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let (owner, name, file) = match parts[..] {
        ["api", "models", owner, name, "revision", "main"] => (owner, name, None),
        [owner, name, "resolve", "main", ref file @ ..] => (owner, name, Some(file.join("/"))),
        _ => return fail("404 Not Found"),
    };
    // Whether it exists is nobody's business without a token.
    if owner == "private" && !allowed {
        return fail("401 Unauthorized");
    }
    if owner == "gated" && file.is_some() {
        return fail("403 Forbidden");
    }
    let Some(files) = content.repositories.get(&format!("{owner}/{name}")) else {
        return fail("404 Not Found");
    };
    let Some(file) = file else {
        let siblings: Vec<String> =
            files.keys().map(|file| format!("{{\"rfilename\":\"{file}\"}}")).collect();
        let body = format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", siblings.join(","));
        return ("200 OK".into(), "content-type: application/json\r\n".into(), body.into());
    };
    let Some(bytes) = files.get(&file) else { return fail("404 Not Found") };
    let (from, to) = range
        .and_then(|range| range.strip_prefix("bytes=")?.split_once('-'))
        .map_or((0, bytes.len()), |(from, to)| {
            (from.parse().unwrap(), to.parse::<usize>().map_or(bytes.len(), |last| last + 1))
        });
    let to = to.min(bytes.len());
    let last = to.saturating_sub(1);
    let headers = format!(
        "etag: \"{}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {from}-{last}/{}\r\n",
        tag(bytes),
        bytes.len()
    );
    ("206 Partial Content".into(), headers, bytes[from..to].to_vec())
}
