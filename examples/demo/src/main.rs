//! Program of the demo image: small tools (`sh`, `httpd`, `sleep`, ...), selected by the name of invocation.
//!
//! `/bin/sleep` of the image is a link to this program. The tools demonstrate probes, logs, restarts, limits, and
//! services without a registry. The kernel ignores unhandled signals to a container's first process; the tools handle
//! SIGTERM and SIGINT by exiting. `examples/demo/image.sh` makes the image.

#![forbid(unsafe_code)]

mod files;
mod http;
mod load;
mod shell;
mod words;

use std::{
    ffi::OsString,
    io::{self, Write},
    path::Path,
    process, thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, Signal};

/// Names of the tools.
const NAMES: &[&str] = &[
    "sleep", "echo", "cat", "env", "exit", "true", "false", "httpd", "wget", "logger", "memhog", "cpuhog", "ls", "id",
    "sh", "sh-lite",
];
/// Exit code for invalid arguments.
const USAGE: i32 = 2;
/// Exit code for an unknown tool.
const UNKNOWN: i32 = 127;

/// Runs the tool of the name of invocation; under its own name, lists the tools.
fn main() {
    let mut args = std::env::args_os();
    match called(args.next().as_ref()) {
        Some(tool) => run_with_signals(tool, args),
        None => println!("{}", NAMES.join("\n")),
    }
}

/// Selects the tool by the name of invocation; `None` for the program itself.
fn called(program: Option<&OsString>) -> Option<&'static str> {
    let name = Path::new(program?).file_name()?.to_str()?;
    let name = name.strip_prefix('-').unwrap_or(name);
    NAMES.iter().copied().find(|tool| *tool == name)
}

/// Runs a tool with the arguments after its name, and exits with its exit code, or on a signal.
fn run_with_signals(tool: &'static str, args: impl Iterator<Item = OsString>) -> ! {
    let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
    let mut ends = SigSet::empty();
    [Signal::SIGTERM, Signal::SIGINT].into_iter().for_each(|signal| ends.add(signal));
    // Blocked in every thread and taken by this one; if that fails, they terminate the process by default.
    let is_blocked = ends.thread_block().is_ok();
    let worker = thread::spawn(move || {
        let code = run(tool, &args);
        // The reader is gone: the output is lost either way.
        let _ = io::stdout().flush();
        process::exit(code);
    });
    if let (true, Ok(signal)) = (is_blocked, ends.wait()) {
        process::exit(128 + signal as i32);
    }
    // The worker exits the process itself.
    let _ = worker.join();
    process::exit(1);
}

/// Runs a tool; returns its exit code.
fn run(tool: &str, args: &[String]) -> i32 {
    let result = match tool {
        "sleep" => sleep(args),
        "echo" => files::echo(args),
        "cat" => files::cat(args),
        "env" => files::env(args),
        "ls" => files::ls(args),
        "id" => files::id(args),
        "true" => Ok(0),
        "false" => Ok(1),
        "exit" => Ok(args.first().map_or(0, |code| code.parse().unwrap_or(USAGE))),
        "httpd" => http::serve(args),
        "wget" => http::wget(args),
        "logger" => load::logger(args),
        "memhog" => load::memhog(args),
        "cpuhog" => load::cpuhog(args),
        "sh" | "sh-lite" => shell::run(args),
        _ => Ok(UNKNOWN),
    };
    result.unwrap_or_else(|error| {
        // If even stderr is closed, the exit code has to suffice.
        let _ = writeln!(io::stderr(), "{tool}: {error}");
        1
    })
}

/// Whether a name is a tool that a script may run.
fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

fn sleep(args: &[String]) -> io::Result<i32> {
    let mut total = Duration::ZERO;
    for arg in args {
        if matches!(arg.as_str(), "infinity" | "inf") {
            loop {
                thread::sleep(Duration::from_secs(3600));
            }
        }
        let Some(more) = duration(arg) else {
            writeln!(io::stderr(), "sleep: invalid number {arg:?}")?;
            return Ok(USAGE);
        };
        total = total.saturating_add(more);
    }
    thread::sleep(total);
    Ok(0)
}

/// Parses `1`, `0.5`, `2s`, `3m`, `4h`, `5d`.
fn duration(text: &str) -> Option<Duration> {
    let unit = |c: char| match c {
        's' => Some(1.0),
        'm' => Some(60.0),
        'h' => Some(3600.0),
        'd' => Some(86400.0),
        _ => None,
    };
    let (number, factor) = match text.chars().next_back().and_then(unit) {
        Some(factor) => (text.get(..text.len() - 1)?, factor),
        None => (text, 1.0),
    };
    let seconds: f64 = number.parse().ok()?;
    Duration::try_from_secs_f64(seconds * factor).ok()
}

/// Value of `--name value` or `--name=value`.
fn option<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == name {
            return args.next().map(String::as_str);
        }
        if let Some(value) = arg.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')) {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applets_are_known_by_the_name_they_are_called_by() {
        for (program, expected) in [
            ("/bin/sleep", Some("sleep")),
            ("sh", Some("sh")),
            ("-sh", Some("sh")),
            ("/usr/local/bin/berth", None),
            ("berth-shim", None),
            ("", None),
        ] {
            assert_eq!(called(Some(&OsString::from(program))), expected, "{program}");
        }
        assert_eq!(called(None), None);
    }

    #[test]
    fn durations_have_units() {
        for (text, expected) in [
            ("1", Some(1000)),
            ("0.25", Some(250)),
            ("2m", Some(120_000)),
            ("-1", None),
            ("x", None),
            ("", None),
            ("s", None),
        ] {
            assert_eq!(duration(text), expected.map(Duration::from_millis), "{text}");
        }
    }

    #[test]
    fn options_are_written_two_ways() {
        let args: Vec<String> = ["--rate", "5", "--size=7"].map(str::to_owned).into();
        assert_eq!(
            (option(&args, "--rate"), option(&args, "--size"), option(&args, "--x")),
            (Some("5"), Some("7"), None)
        );
    }
}
