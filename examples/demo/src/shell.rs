//! Tool `sh`: runs scripts of other tools with `;`, `&&`, `||`, and variables.
//!
//! No pipes, no loops, no jobs.

use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, BufRead, Write},
};

use super::{
    USAGE, files,
    words::{When, assignment, expand, parse},
};

/// Maximum size of a script, bytes.
const LONGEST: u64 = 1 << 20;

struct Shell {
    variables: BTreeMap<String, String>,
    /// Exit code of the last command.
    code: i32,
    has_ended: bool,
}

/// Runs `sh -c SCRIPT`, `sh FILE`, or lines of standard input.
pub fn run(args: &[String]) -> io::Result<i32> {
    let variables = env::vars_os().map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()));
    let mut shell = Shell { variables: variables.collect(), code: 0, has_ended: false };
    match args {
        [flag, script, ..] if flag == "-c" => shell.script(script)?,
        [flag] if flag == "-c" => return Ok(USAGE),
        [file, ..] if !file.starts_with('-') => {
            if fs::metadata(file)?.len() > LONGEST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "script is too long"));
            }
            shell.script(&fs::read_to_string(file)?)?;
        }
        _ => {
            for line in io::stdin().lock().lines() {
                shell.script(&line?)?;
                if shell.has_ended {
                    break;
                }
            }
        }
    }
    Ok(shell.code)
}

impl Shell {
    fn script(&mut self, script: &str) -> io::Result<()> {
        let steps = match parse(script) {
            Ok(steps) => steps,
            Err(error) => {
                self.code = USAGE;
                return writeln!(io::stderr(), "sh: {error}");
            }
        };
        for step in steps {
            let is_due = match step.when {
                When::Always => true,
                When::Success => self.code == 0,
                When::Failure => self.code != 0,
            };
            if is_due {
                self.variables.insert("?".to_owned(), self.code.to_string());
                let words = step.words.iter().map(|word| expand(word, &self.variables)).collect();
                self.code = self.command(words)?;
            }
            if self.has_ended {
                break;
            }
        }
        Ok(())
    }

    fn command(&mut self, mut words: Vec<String>) -> io::Result<i32> {
        if words.first().is_some_and(|word| matches!(word.as_str(), "exec" | "export")) {
            words.remove(0);
        }
        let set = words.iter().take_while(|word| assignment(word).is_some()).count();
        let rest = words.split_off(set);
        let assigned = words.iter().filter_map(|word| assignment(word)).map(|(k, v)| (k.to_owned(), v.to_owned()));
        let Some((program, args)) = rest.split_first() else {
            self.variables.extend(assigned);
            return Ok(0);
        };
        let mut variables = self.variables.clone();
        variables.remove("?");
        variables.extend(assigned);
        match program.as_str() {
            "exit" => {
                self.has_ended = true;
                Ok(args.first().map_or(self.code, |code| code.parse().unwrap_or(USAGE)))
            }
            "cd" => match env::set_current_dir(args.first().map_or("/", String::as_str)) {
                Ok(()) => Ok(0),
                Err(error) => {
                    writeln!(io::stderr(), "sh: cd: {error}")?;
                    Ok(1)
                }
            },
            // These do not use the environment: they need no process.
            "echo" | "true" | "false" | "sleep" | "cat" | "ls" | "id" => Ok(super::run(program, args)),
            _ => files::spawn(program, args, &variables),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decide_what_is_run() {
        for (script, expected) in [
            ("true", 0),
            ("false", 1),
            ("false && exit 5; exit 6", 6),
            ("false || exit 5", 5),
            ("A=7; exit $A", 7),
            ("false; exit $?", 1),
            ("no-such-program-anywhere", 127),
            ("a | b", 2),
            ("exit", 0),
        ] {
            assert_eq!(run(&["-c".to_owned(), script.to_owned()]).expect("runs"), expected, "{script}");
        }
    }
}
