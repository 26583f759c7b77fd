//! `warpsmith completions`: shell completion.

use clap_complete::Shell;
use std::process::ExitCode;
use warpsmith::Result;

/// Print a completion script for your shell
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell to complete in
    #[arg(value_enum)]
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith completions bash \\
      > ~/.local/share/bash-completion/completions/warpsmith
  warpsmith completions zsh > ~/.zfunc/_warpsmith   (~/.zfunc is in fpath)
  warpsmith completions fish > ~/.config/fish/completions/warpsmith.fish";

pub fn run(args: &Args) -> Result<ExitCode> {
    clap_complete::generate(args.shell, &mut crate::command_line(), "warpsmith", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}
