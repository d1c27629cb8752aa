//! A command run by way of another program.

use std::process::Command;

/// `program` with `args`, and then the command with its own arguments and environment.
pub(crate) fn wrap(command: &Command, program: &str, args: &[&str]) -> Command {
    let mut wrapped = Command::new(program);
    wrapped.args(args).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped
}
