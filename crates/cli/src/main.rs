//! The `warpsmith` workbench: a file per command under `commands`.

mod ahead;
mod commands;
mod files;
mod inputs;
mod kernels;
mod model;
mod progress;
mod select;
mod source;
mod table;

use clap::{CommandFactory, Parser, Subcommand};
use std::error::Error;
use std::process::ExitCode;

/// LLM kernels for CUDA and CPU: run models on them, list, check, time and build them
///
/// Warpsmith is a library of LLM kernels for CUDA and CPU behind one API, and an engine that runs models on them. This
/// program answers prompts, and shows what each kernel does on this machine, with or without a GPU.
#[derive(Parser)]
#[command(name = "warpsmith", version, after_help = AFTER_HELP, arg_required_else_help = true, max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Start with:
  warpsmith doctor                       what this machine has and lacks
  warpsmith list                         the ops
  warpsmith list rms_norm                one op: arguments, options and kernels
  warpsmith explain rms_norm --arch 90a  which kernel would run, and why
  warpsmith generate \"Hello\" --model M   an answer of a language model
  warpsmith serve M                      an OpenAI-compatible server

`warpsmith help COMMAND` explains a command with examples.
Exit status: 0 done, 1 failed or not as it should be, 2 wrong usage.";

#[derive(Subcommand)]
enum Command {
    Demo(commands::demo::Args),
    Generate(commands::generate::Args),
    Chat(commands::chat::Args),
    Serve(Box<commands::serve::Args>),
    BenchServe(commands::bench_serve::Args),
    BenchModel(commands::bench_model::Args),
    List(commands::list::Args),
    Check(commands::check::Args),
    Bench(commands::bench::Args),
    Profile(Box<commands::profile::Args>),
    Tune(commands::tune::Args),
    Evidence(commands::evidence::Args),
    Run(commands::run::Args),
    Inspect(commands::inspect::Args),
    Explain(commands::explain::Args),
    Whatif(Box<commands::whatif::Args>),
    Dump(commands::dump::Args),
    Fuse(commands::fuse::Args),
    BuildKernels(commands::build_kernels::Args),
    Cache(commands::cache::Args),
    Doctor(commands::doctor::Args),
    NewOp(commands::new_op::Args),
    Completions(commands::completions::Args),
}

impl Command {
    fn run(&self) -> Result<ExitCode, Box<dyn Error>> {
        Ok(match self {
            Command::Demo(args) => commands::demo::run(args)?,
            Command::Generate(args) => commands::generate::run(args)?,
            Command::Chat(args) => commands::chat::run(args)?,
            Command::Serve(args) => commands::serve::run(args)?,
            Command::BenchServe(args) => commands::bench_serve::run(args)?,
            Command::BenchModel(args) => commands::bench_model::run(args)?,
            Command::List(args) => commands::list::run(args)?,
            Command::Check(args) => commands::check::run(args)?,
            Command::Bench(args) => commands::bench::run(args)?,
            Command::Profile(args) => commands::profile::run(args)?,
            Command::Tune(args) => commands::tune::run(args)?,
            Command::Evidence(args) => commands::evidence::run(args)?,
            Command::Run(args) => commands::run::run(args)?,
            Command::Inspect(args) => commands::inspect::run(args)?,
            Command::Explain(args) => commands::explain::run(args)?,
            Command::Whatif(args) => commands::whatif::run(args)?,
            Command::Dump(args) => commands::dump::run(args)?,
            Command::Fuse(args) => commands::fuse::run(args)?,
            Command::BuildKernels(args) => commands::build_kernels::run(args)?,
            Command::Cache(args) => commands::cache::run(args)?,
            Command::Doctor(args) => commands::doctor::run(args)?,
            Command::NewOp(args) => commands::new_op::run(args)?,
            Command::Completions(args) => commands::completions::run(args)?,
        })
    }
}

/// The whole command line, for completions.
fn command_line() -> clap::Command {
    Cli::command()
}

fn main() -> ExitCode {
    // SAFETY: nothing else runs yet. Rust ignores SIGPIPE, which would turn `warpsmith list | head` into a panic;
    // with the system's own handling the process ends quietly when its reader does.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    Cli::parse().command.run().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_every_command_teaches() {
        let mut cli = command_line();
        cli.build();
        cli.clone().debug_assert();
        for command in cli.get_subcommands().filter(|command| command.get_name() != "help") {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name} has no summary");
            let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(examples.contains(&format!("warpsmith {name}")), "{name} shows no example");
            for line in examples.lines() {
                assert!(line.chars().count() <= 80, "{name} has an example of over 80 columns: {line}");
            }
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{name}: {} has no help", arg.get_id());
            }
        }
    }
}
