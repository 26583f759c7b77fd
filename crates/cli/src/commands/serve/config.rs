//! Options from a file: TOML, with the names of the command line.

use super::Args;
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, FromArgMatches};
use std::ffi::OsString;
use std::path::Path;
use toml::{Table, Value};

type Result<T> = std::result::Result<T, String>;

/// The options of the command line, and those of a file where the command line has none.
pub fn merge(path: &Path) -> Result<Args> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let given: Vec<OsString> = std::env::args_os().collect();
    merged(&text, given).map_err(|why| format!("{}: {why}", path.display()))
}

fn merged(text: &str, given: Vec<OsString>) -> Result<Args> {
    let table: Table = text.parse().map_err(|error| format!("{error}"))?;
    let mut command = crate::command_line();
    command.build();
    let matches = command.clone().try_get_matches_from(&given).map_err(|error| error.to_string())?;
    let (Some(command), Some(matches)) =
        (command.find_subcommand("serve"), matches.subcommand_matches("serve"))
    else {
        return Err("only `serve` reads a file of options".into());
    };
    let mut words = given;
    for (key, value) in &table {
        words.extend(words_of(command, matches, key, value)?.into_iter().map(OsString::from));
    }
    let matches = crate::command_line().try_get_matches_from(words).map_err(|error| error.to_string())?;
    let serve = matches.subcommand_matches("serve").ok_or("it is no `serve`")?;
    Args::from_arg_matches(serve).map_err(|error| error.to_string())
}

/// An entry of the file as words of the command line; none if that has the option already.
fn words_of(command: &Command, matches: &ArgMatches, key: &str, value: &Value) -> Result<Vec<String>> {
    let name = key.replace('_', "-");
    let has_name = |arg: &&clap::Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(&name) || aliases.contains(&name.as_str())
    };
    let Some(arg) = command.get_arguments().find(has_name).filter(|arg| arg.get_long() != Some("config"))
    else {
        return Err(format!("there is no option `{key}`; `warpsmith serve --help` lists them"));
    };
    if matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine) {
        return Ok(Vec::new());
    }
    let option = format!("--{}", arg.get_long().unwrap_or(&name));
    let refuse = |expected: &str| Err(format!("`{key}`: expected {expected}, got {value}"));
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    };
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(true)) => Ok(vec![option]),
        (ArgAction::SetTrue, Value::Boolean(false)) => Ok(Vec::new()),
        (ArgAction::SetTrue, _) => refuse("true or false"),
        (ArgAction::Append, Value::Array(values)) => {
            let one = |value: &Value| text(value).map(|text| format!("{option}={text}"));
            values
                .iter()
                .map(one)
                .collect::<Option<Vec<String>>>()
                .map_or_else(|| refuse("a list of texts"), Ok)
        }
        (_, value) => match text(value) {
            Some(text) => Ok(vec![format!("{option}={text}")]),
            None => refuse("a text or a number"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, words: &str) -> Result<Args> {
        merged(text, words.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn a_file_fills_in_what_the_command_line_leaves_out() {
        let text = "model = \"a.gguf\"\nport = 8000\nhost = \"::1\"\napi_key = [\"x\", \"y\"]\n\
            max-num-seqs = 7\ndisable-radix-cache = true\nstall-timeout = 2.5\nno-overlap = false\n";
        let args = read(text, "warpsmith serve --port 9 --config f --api-key z").unwrap();
        assert_eq!((args.port, args.host.as_str()), (9, "::1"));
        assert_eq!(args.api_key, ["z"]);
        assert_eq!((args.max_running_requests, args.disable_radix_cache), (7, true));
        assert_eq!(args.stall_timeout.as_millis(), 2500);
        assert!(args.model.is_given());
        for (text, told) in [
            ("speed = 3", "no option `speed`"),
            ("port = true", "a text or a number"),
            ("port = 70000", "70000"),
            ("disable-radix-cache = 1", "true or false"),
            ("api-key = [[1]]", "a list of texts"),
            ("port = ", "TOML"),
            ("config = \"other\"", "no option `config`"),
        ] {
            let why = read(text, "warpsmith serve").err().unwrap_or_default();
            assert!(why.contains(told), "{text}: {why}");
        }
    }
}
