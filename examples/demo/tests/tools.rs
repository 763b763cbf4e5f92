//! The program as the image runs it: tools by name of invocation, and exit codes on signals.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_berth-demo");

#[test]
fn its_own_name_lists_the_tools() {
    let output = Command::new(PROGRAM).output().expect("it starts");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success() && text.lines().any(|tool| tool == "httpd"), "{text}");
}

#[test]
fn the_shell_runs_tools_and_returns_their_code() {
    let output = Command::new(PROGRAM).arg0("sh").args(["-c", "env A=7 sh -c 'echo $A'; id; exit 7"]).output();
    let output = output.expect("it starts");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.starts_with("7\n") && text.contains("uid="), "{text}");
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn a_signal_ends_a_server() {
    let mut command = Command::new(PROGRAM);
    let mut server = command.arg0("/bin/httpd").arg("127.0.0.1:0").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut line).expect("readable");
    assert!(line.starts_with("httpd: listening on 127.0.0.1:"), "{line}");
    let pid = Pid::from_raw(i32::try_from(server.id()).expect("a process ID"));
    kill(pid, Signal::SIGTERM).expect("it runs");
    let status = server.wait().expect("it ends");
    assert_eq!((status.code(), status.signal()), (Some(143), None));
}
