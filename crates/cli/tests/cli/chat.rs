//! `warpsmith chat` and `generate` as people use them: commands, pipes, a terminal, Ctrl-C.

use crate::models::talking;
use crate::{parse, warpsmith};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than any answer here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn pipes(folder: &Path, words: &[&str]) -> Child {
    let mut command = warpsmith(folder);
    command.args(words).arg("--model").arg(folder);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn given(folder: &Path, words: &[&str], input: &[u8]) -> Output {
    let mut child = pipes(folder, words);
    // The command may end before it has read all.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// The small model with room for an answer that takes long.
fn talking_for_long(folder: &Path) {
    talking(folder, |_| ());
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = 65536.into();
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn commands_of_a_chat() {
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let lines = b"/help\n/nonsense\n\xff\xfe\nabc\n/system no\nabc\n/system\nabc\n/exit\nnever read\n";
    let output = given(folder.path(), &["chat", "--max-tokens", "4", "--ignore-eos", "--stats"], lines);
    let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
    for command in ["/help", "/clear", "/system TEXT", "/exit"] {
        assert!(text.contains(command), "{text}");
    }
    // The template refuses a message `no`, that of the system too.
    let expected = ["/nonsense", "not UTF-8", "prompt tokens", "not that", "prompt tokens"];
    let told: Vec<&str> = told.lines().collect();
    assert_eq!(told.len(), expected.len(), "{told:?}");
    for (line, part) in told.iter().zip(expected) {
        assert!(line.contains(part), "{told:?}");
    }
}

#[test]
fn an_interrupted_answer_ends_and_the_chat_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    talking_for_long(folder.path());
    let mut chat = pipes(folder.path(), &["chat", "--ignore-eos", "--context", "65536"]);
    let (mut stdin, mut stdout) = (chat.stdin.take().unwrap(), chat.stdout.take().unwrap());
    stdin.write_all(b"abc\n").unwrap();
    stdout.read_exact(&mut [0; 16]).unwrap();
    interrupt(&chat);
    // Whatever was written until then, and the end of its line.
    let reader = std::thread::spawn(move || {
        let mut rest = Vec::new();
        stdout.read_to_end(&mut rest).unwrap();
    });
    stdin.write_all(b"/nonsense\n/exit\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    reader.join().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {told}", output.status);
    assert!(told.contains("(stopped)") && told.contains("/nonsense"), "{told}");
}

fn interrupt(child: &Child) {
    // SAFETY: the process is ours and has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) }, 0);
}

/// A terminal: what is typed into it, and what it shows.
struct Terminal {
    keys: File,
    shown: std::sync::mpsc::Receiver<Vec<u8>>,
    text: String,
}

impl Terminal {
    fn open() -> (Terminal, OwnedFd) {
        let (mut master, mut slave) = (0, 0);
        let (name, options, size) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both places are valid, and the rest is optional.
        assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, name, options, size) }, 0);
        // SAFETY: the descriptors are new, so nobody else owns them.
        let (keys, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let (sender, shown) = std::sync::mpsc::channel();
        let mut screen = keys.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        (Terminal { keys, shown, text: String::new() }, slave)
    }

    /// Waits for a text, and forgets everything before its end.
    fn wait_for(&mut self, text: &str) {
        let start = Instant::now();
        loop {
            if let Some(at) = self.text.find(text) {
                self.text.drain(..at + text.len());
                return;
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.text += &String::from_utf8_lossy(&bytes),
                Err(_) => panic!("{text:?} did not come, only {:?}", self.text),
            }
        }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }
}

#[test]
fn a_terminal_has_editing_history_and_control_c() {
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let (mut terminal, slave) = Terminal::open();
    let mut command = warpsmith(folder.path());
    command.args(["chat", "--max-tokens", "4", "--ignore-eos", "--stats", "--model"]).arg(folder.path());
    command.env("TERM", "xterm").stdin(slave.try_clone().unwrap()).stdout(slave.try_clone().unwrap());
    let mut chat = command.stderr(slave).spawn().unwrap();
    // Its copies of the terminal would keep it open.
    drop(command);
    terminal.wait_for("> ");
    // `/nonsensf`, the last letter taken back.
    terminal.type_keys("/nonsensf\x7fe\r");
    terminal.wait_for("unknown command /nonsense;");
    terminal.wait_for("> ");
    // The line before, again.
    terminal.type_keys("\x1b[A\r");
    terminal.wait_for("unknown command /nonsense;");
    terminal.wait_for("> ");
    terminal.type_keys("\x03");
    terminal.wait_for("Ctrl-C again");
    terminal.wait_for("> ");
    // A message in between: the next Ctrl-C is a first one again.
    terminal.type_keys("abc\r");
    terminal.wait_for("prompt tokens");
    terminal.wait_for("> ");
    terminal.type_keys("\x03");
    terminal.wait_for("Ctrl-C again");
    terminal.wait_for("> ");
    terminal.type_keys("\x03");
    assert!(chat.wait().unwrap().success());
}

#[test]
fn a_prompt_comes_from_wherever_it_is() {
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let file = folder.path().join("prompt.txt");
    std::fs::write(&file, "abc\r\n").unwrap();
    let options = ["--max-tokens", "4", "--ignore-eos", "--json"];
    let tokens = |words: &[&str], input: &[u8]| {
        let output = given(folder.path(), &[&["generate"][..], words, &options].concat(), input);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {told}");
        let result = parse(std::str::from_utf8(&output.stdout).unwrap());
        (result["prompt"].clone(), result["tokens"].clone())
    };
    let expected = tokens(&["abc"], b"ignored");
    assert_eq!(expected.1.as_array().unwrap().len(), 4);
    assert_eq!(tokens(&["-"], b"abc\n"), expected);
    assert_eq!(tokens(&[], b"abc"), expected);
    assert_eq!(tokens(&["--file", file.to_str().unwrap()], b""), expected);
    for threads in ["1", "3"] {
        assert_eq!(tokens(&["abc", "--threads", threads], b""), expected);
    }
    let fails = |words: &[&str], input: &[u8], status: i32| {
        let output = given(folder.path(), words, input);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {told}");
        told
    };
    assert!(fails(&["generate"], b"", 1).contains("nothing in standard input"));
    assert!(fails(&["generate", "-"], b"a\xff", 1).contains("UTF-8"));
    assert!(fails(&["generate", "--file", "/no/such/file"], b"", 1).contains("/no/such/file"));
    fails(&["generate", "abc", "--file", "x"], b"", 2);
    for command in ["generate", "chat", "bench-model"] {
        for threads in ["0", "4097", "many"] {
            assert!(fails(&[command, "--threads", threads], b"", 2).contains("--threads"));
        }
    }
    fails(&["generate", "abc", "--outputs", "0"], b"", 2);
}

#[test]
fn a_prompt_can_have_several_outputs() {
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let words = ["generate", "abc", "--max-tokens", "4", "--ignore-eos", "--temperature", "1", "--seed", "7"];
    let with = |more: &[&str]| {
        let output = given(folder.path(), &[&words[..], &["--outputs", "3"], more].concat(), b"");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let result = parse(&with(&["--json"]));
    let outputs = result["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), 3);
    assert!(outputs.iter().all(|output| output["tokens"].as_array().unwrap().len() == 4));
    assert!(outputs.iter().any(|output| output["tokens"] != outputs[0]["tokens"]), "{result}");
    assert!(result["prompt_tokens"].as_u64().unwrap() > 0);
    let text = with(&[]);
    assert!(text.starts_with("--- 1 of 3 ---\n") && text.contains("--- 3 of 3 ---\n"), "{text}");
}
