//! Exec processes of a running container.

use std::{
    io::{Read, Write},
    os::fd::AsFd,
    time::Instant,
};

use berth_shim::plan::FailureKind;

use crate::launch::process::no_mkdir;
use berth_testkit::launch_fixture::{
    LaunchFixture, NOTHING, PATIENCE, begin, conclude_begun, exec, is_root, process, readable, start, stdout_of,
};

#[test]
fn a_further_process_is_in_all_of_the_container() {
    // AC-09a-X9
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let mut plan = bench.plan(&["sh", "-c", "echo mine > /tmp/file; echo up; cat"]);
        plan.process.seccomp = Some(no_mkdir());
        let mut container = start(&plan, &NOTHING).expect("it runs");
        assert_eq!(container.line(), "up");
        let script = "cat /tmp/file; cat /proc/self/cgroup; grep Seccomp: /proc/self/status; mkdir /tmp/x 2>/dev/null \
                      || echo refused; for n in mnt pid ipc net uts; do readlink /proc/1/ns/$n; readlink \
                      /proc/self/ns/$n; done; id -u";
        let mut given = process(&["sh", "-c", script]);
        given.seccomp = Some(no_mkdir());
        (given.uid, given.cwd) = (0, "/tmp".to_owned());
        let out = stdout_of(exec(&plan, container.pid, given).map(berth_testkit::launch_fixture::RunningProcess::end));
        let lines: Vec<&str> = out.lines().collect();
        assert_eq!(lines.first(), Some(&"mine"));
        let groups = plan.groups.iter().filter_map(|group| group.file_name()?.to_str()).count();
        let inside = lines.iter().filter(|line| line.contains("/berth-launch-")).count();
        assert_eq!(inside, groups, "{out}");
        let rest = lines.iter().skip_while(|line| !line.starts_with("Seccomp:")).collect::<Vec<_>>();
        assert_eq!(rest.iter().take(2).map(|line| **line).collect::<Vec<_>>(), ["Seccomp:\t2", "refused"]);
        for pair in rest.iter().skip(2).take(10).collect::<Vec<_>>().chunks(2) {
            assert_eq!(pair.first(), pair.last());
        }
        assert_eq!(rest.last(), Some(&&"0"));
        let failure = exec(&plan, container.pid, process(&["foo"])).map(drop).expect_err("no such program");
        let text = "exec: \"foo\": executable file not found in $PATH";
        assert_eq!((failure.kind, failure.text.as_str()), (FailureKind::Program, text));
        container.kill();
        assert!(exec(&plan, 1 << 22, process(&["true"])).is_err(), "nobody is there");
    });
}

#[test]
fn nothing_of_the_host_is_open_to_a_program() {
    // CVE-2024-21626
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let plan = bench.plan(&["sh", "-c", "ls -l /proc/self/fd | grep -c ' -> '; cat"]);
        let mut container = start(&plan, &NOTHING).expect("it runs");
        assert_eq!(container.line(), "3");
        for number in 3..24 {
            let mut given = process(&["true"]);
            given.cwd = format!("/proc/self/fd/{number}");
            assert!(exec(&plan, container.pid, given).is_err(), "{number}");
            for program in ["../bin/true", "../usr/bin/env"] {
                let mut wanted = bench.plan(&[&format!("/proc/self/fd/{number}/{program}")]);
                let failure = exec(&plan, container.pid, wanted.process.clone()).map(drop).expect_err("no program");
                assert_eq!(failure.kind, FailureKind::Program, "{number}: {failure}");
                wanted.container = "second".to_owned();
                let failure = start(&wanted, &NOTHING).map(drop).expect_err("no program");
                assert_eq!(failure.kind, FailureKind::Program, "{number}: {failure}");
            }
        }
        container.kill();
    });
}

#[test]
fn many_at_once_leave_nothing_open() {
    // AC-09a-X20
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let open = || std::fs::read_dir("/proc/self/fd").expect("readable").count();
        let plan = bench.plan(&["sh", "-c", "echo up; cat"]);
        let mut container = start(&plan, &NOTHING).expect("it runs");
        assert_eq!(container.line(), "up");
        let before = open();
        for _ in 0..4 {
            let begun: Vec<_> = (0..64).map(|_| begin(&plan, container.pid, process(&["echo", "hello"]))).collect();
            for running in begun.into_iter().map(conclude_begun) {
                assert_eq!(stdout_of(running.map(berth_testkit::launch_fixture::RunningProcess::end)), "hello\n");
            }
        }
        assert_eq!(open(), before);
        container.kill();
    });
}

#[test]
fn programs_have_terminals() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let script = "tty; stty size; stat -c '%u %t' /dev/console; readlink /proc/self/fd/0; stty -echo; echo up; cat";
        let mut plan = bench.plan(&["sh", "-c", script]);
        plan.process.terminal = Some((80, 25));
        plan.process.uid = 1000;
        let mut container = start(&plan, &NOTHING).expect("it runs");
        let mut master = std::fs::File::from(container.terminal.take().expect("a terminal"));
        assert_eq!(until(&mut master, "up\r\n"), "/dev/pts/0\r\n25 80\r\n1000 88\r\n/dev/pts/0\r\nup\r\n");
        let mut given = process(&["sh", "-c", "tty; stty size; echo more"]);
        given.terminal = Some((100, 40));
        let mut further = exec(&plan, container.pid, given).expect("it runs");
        let mut second = std::fs::File::from(further.terminal.take().expect("a terminal"));
        assert_eq!(until(&mut second, "more\r\n"), "/dev/pts/1\r\n40 100\r\nmore\r\n");
        assert_eq!(further.end().code, 0);
        master.write_all(b"line\n\x04").expect("writable");
        assert_eq!(until(&mut master, "line\r\n"), "line\r\n");
        assert_eq!(container.end().code, 0);
    });
}

fn until(master: &mut std::fs::File, end: &str) -> String {
    let (mut text, mut buffer) = (String::new(), [0; 512]);
    let deadline = Instant::now() + PATIENCE;
    while !text.ends_with(end) {
        readable(&master.as_fd(), deadline);
        match master.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => text.push_str(&String::from_utf8_lossy(&buffer[..length])),
            Err(error) => panic!("{error}: {text:?}"),
        }
    }
    text
}
