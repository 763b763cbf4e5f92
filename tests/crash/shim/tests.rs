//! Behavior of a shim process as seen by its client: streams, logs, exits, reconnects, and limits.

use std::{
    fs,
    io::{ErrorKind, Write},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use berth_runtime::shim::client;
use berth_shim::{
    exit_record::ExitRecord,
    plan::{ExitEvent, FailureKind, LaunchPlan, ProcessTarget, Reply, Scope, ShimRequest},
    socket,
    wire::{self, DatagramKind},
};

use crate::shim::fixture::{Fixture, kind, pipe, read_all, records, until};
use berth_testkit::plans;

use crate::shim_tests;

shim_tests! {
    streams_of_two_containers_go_to_their_logs
    long_lines_become_records
    a_log_is_opened_again_after_it_was_renamed
    exits_without_a_client_are_reported_exactly
    a_killed_client_loses_nothing
    another_client_replaces_the_first
    exits_have_the_code_or_the_signal
    a_failed_or_hung_start_is_reported
    exec_output_goes_to_the_pipes_of_the_daemon
    everybody_attached_sees_what_is_written
    a_client_that_does_not_read_blocks_nothing
    the_first_client_to_end_its_input_closes_stdin
    a_pipe_open_in_leftover_processes_is_abandoned
    a_shim_exits_on_shutdown_and_not_before
    a_killed_shim_is_missed_at_once
    datagrams_that_are_none_end_the_connection_only
    whatever_is_sent_containers_run_on
    plans_may_be_long
    a_start_goes_on_without_a_client
    nothing_grows_with_the_number_of_processes
}

fn of(event: &ExitEvent) -> (&str, i32) {
    match &event.of {
        ProcessTarget::Container(id) | ProcessTarget::Exec(_, id) => (id, event.exit.code),
        ProcessTarget::Init => ("init", event.exit.code),
    }
}

async fn streams_of_two_containers_go_to_their_logs() {
    let mut rig = Fixture::new().await;
    let script = |name: &str| format!("for i in 1 2 3; do echo {name}$i; done; echo bad >&2; printf end");
    rig.launch("a", &script("a")).await;
    rig.launch("b", &script("b")).await;
    let mut ended = [rig.event().await, rig.event().await].map(|event| of(&event).0.to_owned());
    ended.sort();
    assert_eq!(ended, ["a", "b"]);
    for name in ["a", "b"] {
        let (out, err): (Vec<String>, Vec<String>) =
            rig.records(name).into_iter().partition(|record| record.starts_with("stdout"));
        let expected = ["1", "2", "3"].map(|i| format!("stdout F {name}{i}"));
        assert_eq!(out.split_last(), Some((&"stdout P end".to_owned(), &expected[..])));
        assert_eq!(err, ["stderr F bad"]);
    }
}

/// AC-09a-X12, through a pipe and a file.
async fn long_lines_become_records() {
    let mut rig = Fixture::new().await;
    rig.launch("a", "head -c 40000 /dev/zero | tr '\\0' x; echo").await;
    assert_eq!(of(&rig.event().await), ("a", 0));
    let lengths: Vec<(String, usize)> =
        rig.records("a").iter().map(|record| (record[..8].to_owned(), record.len() - 9)).collect();
    let record = |tag: &str, length| (format!("stdout {tag}"), length);
    assert_eq!(lengths, [record("P", 16_384), record("P", 16_384), record("F", 7_232)]);
}

/// AC-09a-X13, AC-09a-X19
async fn a_log_is_opened_again_after_it_was_renamed() {
    let mut rig = Fixture::new().await;
    let (stdin, input) = pipe();
    let (_output, stdout) = pipe();
    let plan = LaunchPlan { stdin: true, stdin_once: true, ..rig.plan("a", "cat") };
    rig.shim.launch(plan).await.expect("launched");
    rig.shim.attach("a", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
    let mut input = fs::File::from(input);
    input.write_all(b"one\n").expect("written");
    rig.until_records("a", 1).await;
    let old = rig.log("a").with_extension("1");
    fs::rename(rig.log("a"), &old).expect("renamed");
    input.write_all(b"two\n").expect("written");
    until(|| (records(&old).len() == 2).then_some(())).await;
    rig.shim.reopen_log("a").await.expect("opened");
    input.write_all(b"three\n").expect("written");
    drop(input);
    assert_eq!(of(&rig.event().await), ("a", 0));
    assert_eq!(records(&old), ["stdout F one", "stdout F two"]);
    assert_eq!(rig.records("a"), ["stdout F three"]);
    fs::remove_file(rig.log("a")).expect("removed");
    assert_eq!(kind(rig.shim.reopen_log("a").await), FailureKind::State);
    assert!(!rig.log("a").exists(), "no file is made for what has ended");
}

async fn exits_without_a_client_are_reported_exactly() {
    let mut rig = Fixture::new().await;
    let started = rig.launch("a", "read x < /dev/zero & sleep 0.05; exit 7").await;
    rig.cut();
    let record = until(|| ExitRecord::read(rig.folder.path(), "a").expect("readable")).await;
    assert_eq!((record.pid, record.start_ticks, record.exit.code), (started.pid, started.start_ticks, 7));
    rig.again().await;
    if rig.hello.events.is_empty() {
        rig.event().await; // its leftover processes kept the pipes open
        rig.again().await;
    }
    let [event] = &rig.hello.events[..] else { panic!("one event: {:?}", rig.hello) };
    assert_eq!(of(event), ("a", 7));
    assert_eq!(event.exit.at_ns, record.exit.at_ns);
    let [container] = &rig.hello.containers[..] else { panic!("one container") };
    assert_eq!((container.started, container.exit), (started, Some(event.exit)));
    rig.shim.acknowledge(event.number).await.expect("acknowledged");
    rig.again().await;
    assert_eq!((rig.hello.events.len(), rig.hello.containers.len()), (0, 1));
    rig.shim.forget("a").await.expect("forgotten");
    assert_eq!(kind(rig.shim.forget("a").await), FailureKind::Unknown);
    assert!(ExitRecord::read(rig.folder.path(), "a").expect("readable").is_some(), "the daemon's to delete");
}

/// AC-09-E2, for one container: no line is lost while no client is connected.
async fn a_killed_client_loses_nothing() {
    let mut rig = Fixture::new().await;
    let started = rig.launch("a", "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; read x").await;
    rig.until_records("a", 10).await;
    rig.cut();
    rig.until_records("a", 2000).await;
    rig.again().await;
    let expected: Vec<String> = (0..2000).map(|i| format!("stdout F line {i}")).collect();
    assert!(rig.records("a") == expected, "every line, once, in order");
    let ended = rig.hello.containers.first().and_then(|container| container.exit);
    // stdin is /dev/null, so the last command ends at once.
    let exit = match ended {
        Some(exit) => exit,
        None => rig.event().await.exit,
    };
    assert_eq!(exit.code, 1);
    assert_eq!(rig.hello.containers.first().map(|container| container.started), Some(started));
}

async fn another_client_replaces_the_first() {
    let mut rig = Fixture::new().await;
    let first = rig.shim.clone();
    let (second, _events, connection) =
        client::connect(rig.folder.path(), Duration::from_secs(5)).await.expect("connected");
    let driver = tokio::spawn(connection.run());
    second.hello().await.expect("an answer");
    assert_eq!(rig.events.next().await, None, "the first one's connection is over");
    assert!(first.acknowledge(0).await.expect_err("replaced").is_lost());
    rig.again().await;
    driver.await.expect("ran");
    assert!(second.acknowledge(0).await.expect_err("replaced").is_lost());
    rig.launch("a", "exit 3").await;
    assert_eq!(of(&rig.event().await), ("a", 3));
}

async fn exits_have_the_code_or_the_signal() {
    let mut rig = Fixture::new().await;
    rig.launch("a", "exit 42").await;
    let event = rig.event().await;
    assert_eq!((of(&event), event.exit.is_signal, event.number), (("a", 42), false, 1));
    rig.launch("b", "kill -TERM $$").await;
    let event = rig.event().await;
    assert_eq!((of(&event), event.exit.is_signal), (("b", 143), true));
    let started = rig.launch("c", "exec sleep 1000").await;
    assert_eq!(kind(rig.shim.forget("c").await), FailureKind::State);
    let to = ProcessTarget::Container("c".to_owned());
    assert_eq!(kind(rig.shim.signal(to.clone(), 99, Scope::Process).await), FailureKind::Other);
    rig.shim.signal(to.clone(), 34 + 3, Scope::Process).await.expect("a real-time signal");
    let event = rig.event().await;
    assert_eq!((of(&event), event.exit.is_oom), (("c", 128 + 37), false));
    assert!(event.exit.at_ns >= started.at_ns);
    assert_eq!(kind(rig.shim.signal(to, 9, Scope::Process).await), FailureKind::State);
    assert_eq!(kind(rig.shim.launch(rig.plan("c", "exit 0")).await), FailureKind::State);
}

/// AC-09a-X6, for the shim's part.
async fn a_failed_or_hung_start_is_reported() {
    let rig = Fixture::new().await;
    assert_eq!(kind(rig.shim.launch(plans::plain("a", &["/nowhere/program"])).await), FailureKind::Program);
    for id in ["", "..", "a/b"] {
        assert_eq!(kind(rig.shim.launch(plans::plain(id, &["true"])).await), FailureKind::Other, "{id}");
    }
    let slow = LaunchPlan { limit_ms: 100, ..plans::plain("a", &["slow"]) };
    assert_eq!(kind(rig.shim.launch(slow).await), FailureKind::Deadline);
    let bad_log = LaunchPlan { log: Some("/proc/nowhere/0.log".into()), ..plans::plain("a", &["true"]) };
    assert_eq!(kind(rig.shim.launch(bad_log).await), FailureKind::Other);
    rig.launch("a", "exit 0").await;
    let children = format!("/proc/{0}/task/{0}/children", rig.pid);
    until(|| fs::read_to_string(&children).expect("children").is_empty().then_some(())).await;
}

async fn exec_output_goes_to_the_pipes_of_the_daemon() {
    let mut rig = Fixture::new().await;
    assert_eq!(kind(rig.exec("a", "e", "true").await), FailureKind::Unknown);
    rig.launch("a", "exec sleep 1000").await;
    let (_, output) = rig.exec("a", "e1", "echo hi; exit 5").await.expect("started");
    assert_eq!(read_all(output).await, "hi\n");
    assert_eq!(of(&rig.event().await), ("e1", 5));
    let (_, output) = rig.exec("a", "e2", "sleep 1000 & exec sleep 1000").await.expect("started");
    assert_eq!(kind(rig.exec("a", "e2", "true").await), FailureKind::State);
    let to = ProcessTarget::Exec("a".to_owned(), "e2".to_owned());
    rig.shim.signal(to.clone(), 9, Scope::Group).await.expect("signalled");
    assert_eq!(of(&rig.event().await), ("e2", 137));
    assert_eq!(read_all(output).await, "", "its whole group was killed");
    assert_eq!(kind(rig.shim.signal(to.clone(), 9, Scope::Group).await), FailureKind::Unknown);
    assert_eq!(kind(rig.shim.resize(to, 80, 25).await), FailureKind::State);
    let no_files = rig.shim.exec(plans::exec("a", "e3", &["true"]), None).await;
    assert_eq!(kind(no_files), FailureKind::Other);
    rig.kill("a").await;
    assert_eq!(of(&rig.event().await), ("a", 137));
    assert_eq!(kind(rig.exec("a", "e4", "true").await), FailureKind::State);
}

async fn everybody_attached_sees_what_is_written() {
    let mut rig = Fixture::new().await;
    let plan = LaunchPlan { stdin: true, ..rig.plan("a", "read x; echo out $x; echo err $x >&2") };
    rig.shim.launch(plan).await.expect("launched");
    let mut seen = Vec::new();
    for _ in 0..2 {
        let ((out, stdout), (err, stderr)) = (pipe(), pipe());
        rig.shim.attach("a", None, stdout.as_fd(), Some(stderr.as_fd())).await.expect("attached");
        seen.push((out, err));
    }
    let ((stdin, input), (_out, stdout)) = (pipe(), pipe());
    rig.shim.attach("a", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
    fs::File::from(input).write_all(b"word\n").expect("written");
    assert_eq!(of(&rig.event().await), ("a", 0));
    for (out, err) in seen {
        assert_eq!((read_all(out).await, read_all(err).await), ("out word\n".to_owned(), "err word\n".to_owned()));
    }
    assert_eq!(kind(rig.shim.attach("a", None, stdout.as_fd(), None).await), FailureKind::State);
}

async fn a_client_that_does_not_read_blocks_nothing() {
    let mut rig = Fixture::new().await;
    let plan = LaunchPlan {
        stdin: true,
        ..rig.plan("a", &format!("read x; yes {} | head -n 30000; echo done", "y".repeat(99)))
    };
    rig.shim.launch(plan).await.expect("launched");
    let ((stdin, input), (unread, stdout)) = (pipe(), pipe());
    rig.shim.attach("a", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
    drop(stdout);
    fs::File::from(input).write_all(b"\n").expect("written");
    // A container that waited for the client would never exit.
    assert_eq!(of(&rig.event().await), ("a", 0));
    let text = fs::read(rig.log("a")).expect("a log");
    assert!(text.ends_with(b"stdout F done\n"));
    assert_eq!(text.iter().filter(|byte| **byte == b'\n').count(), 30_001);
    println!("  peak with a megabyte held: {} kB", rig.memory("VmHWM"));
    let seen = read_all(unread).await;
    assert!(seen.len() >= 1 << 20 && seen.len() < 1_500_000, "{}", seen.len());
}

async fn the_first_client_to_end_its_input_closes_stdin() {
    let mut rig = Fixture::new().await;
    let plan = LaunchPlan { stdin: true, stdin_once: true, ..rig.plan("once", "cat") };
    rig.shim.launch(plan).await.expect("launched");
    let ((stdin, input), (out, stdout)) = (pipe(), pipe());
    rig.shim.attach("once", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
    drop((stdin, stdout));
    // More than all buffers on the way.
    let text = "x".repeat(300_000);
    let written = text.clone();
    let writer = tokio::task::spawn_blocking(move || fs::File::from(input).write_all(written.as_bytes()));
    assert!(read_all(out).await == text, "what goes in comes out");
    writer.await.expect("ran").expect("written");
    assert_eq!(of(&rig.event().await), ("once", 0));

    let plan = LaunchPlan { stdin: true, ..rig.plan("often", "cat") };
    rig.shim.launch(plan).await.expect("launched");
    for word in ["one\n", "two\n"] {
        let ((stdin, input), (_out, stdout)) = (pipe(), pipe());
        rig.shim.attach("often", Some(stdin.as_fd()), stdout.as_fd(), None).await.expect("attached");
        fs::File::from(input).write_all(word.as_bytes()).expect("written");
        drop(stdin);
        rig.until_records("often", if word == "one\n" { 1 } else { 2 }).await;
    }
    rig.shim.close_stdin("often").await.expect("closed");
    assert_eq!(of(&rig.event().await), ("often", 0));
}

async fn a_pipe_open_in_leftover_processes_is_abandoned() {
    let mut rig = Fixture::new().await;
    let start = Instant::now();
    rig.launch("a", "sleep 1000 & echo said; exit 4").await;
    assert_eq!(of(&rig.event().await), ("a", 4));
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(2), "{waited:?}");
    assert_eq!(rig.records("a"), ["stdout F said"]);
}

async fn a_shim_exits_on_shutdown_and_not_before() {
    let mut rig = Fixture::new().await;
    rig.launch("a", "exec sleep 1000").await;
    assert_eq!(kind(rig.shim.shutdown().await), FailureKind::State);
    rig.kill("a").await;
    let event = rig.event().await;
    rig.shim.acknowledge(event.number).await.expect("acknowledged");
    rig.shim.shutdown().await.expect("received");
    assert_eq!(rig.events.next().await, None);
    assert!(rig.shim.acknowledge(1).await.expect_err("gone").is_lost());
    let proc = format!("/proc/{}", rig.pid);
    until(|| (!std::path::Path::new(&proc).exists()).then_some(())).await;
    let gone = client::connect(rig.folder.path(), Duration::from_secs(1)).await.expect_err("gone");
    assert!(gone.is_lost(), "{gone}");
}

/// AC-09-E3, for the client's part.
async fn a_killed_shim_is_missed_at_once() {
    let mut rig = Fixture::new().await;
    let started = rig.launch("a", "exec sleep 1000").await;
    let asked = rig.shim.clone();
    let slow = LaunchPlan { limit_ms: 600_000, ..plans::plain("b", &["slow"]) };
    let slow = tokio::spawn(async move { asked.launch(slow).await });
    let children = format!("/proc/{0}/task/{0}/children", rig.pid);
    let both = until(|| {
        let text = fs::read_to_string(&children).expect("children");
        Some(text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).filter(|pids| pids.len() == 2)
    })
    .await;
    assert!(both.contains(&started.pid.to_string()));
    kill(rig.pid);
    assert_eq!(rig.events.next().await, None);
    // Long before its own timeout, by the timeout of the test.
    assert!(slow.await.expect("ran").expect_err("lost").is_lost());
    both.iter().for_each(|pid| kill(pid.parse().expect("a number")));
    // The kernel closes the shim's descriptors one by one.
    until(|| socket::connect(rig.folder.path()).err()).await;
    let gone = client::connect(rig.folder.path(), Duration::from_secs(1)).await.expect_err("gone");
    assert!(gone.is_lost(), "{gone}");
}

fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a number");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it ran");
}

async fn datagrams_that_are_none_end_the_connection_only() {
    let mut rig = Fixture::new().await;
    rig.launch("a", "exec sleep 1000").await;
    for bytes in [&b"x"[..], &[0; 16], &[0x48, 0x53, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[7; 100_000]] {
        let socket = socket::connect(rig.folder.path()).expect("connected");
        let (end, sent) = pipe();
        assert!(socket::send(socket.as_fd(), bytes, &[sent.as_fd()]).expect("sent"));
        drop(sent);
        // The descriptor in the datagram is closed as well.
        assert_eq!(read_all(end).await, "");
        let answer = until(|| match socket::receive(socket.as_fd()).expect("readable") {
            socket::ReceiveResult::Nothing => None,
            other => Some(other),
        });
        assert!(matches!(answer.await, socket::ReceiveResult::End));
    }
    // A valid header with an invalid body gets a response.
    let mut bytes = vec![0x48, 0x53, 1, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0];
    bytes.push(0xff);
    let socket = socket::connect(rig.folder.path()).expect("connected");
    assert!(socket::send(socket.as_fd(), &bytes, &[]).expect("sent"));
    let answer = until(|| match socket::receive(socket.as_fd()).expect("readable") {
        socket::ReceiveResult::Nothing => None,
        other => Some(other),
    });
    assert!(matches!(answer.await, socket::ReceiveResult::Datagram(..)));
    rig.again().await;
    assert_eq!(rig.hello.containers.len(), 1);
    rig.kill("a").await;
    assert_eq!(of(&rig.event().await), ("a", 137));
}

/// Corrupts every request in many ways: each gets a response or ends its connection.
async fn whatever_is_sent_containers_run_on() {
    let mut rig = Fixture::new().await;
    let started = rig.launch("a", "exec sleep 1000").await;
    let (request, kind) =
        (|request: ShimRequest| wire::write(DatagramKind::Request, 1, &request).expect("short"), Scope::Group);
    let seeds = [
        request(ShimRequest::Hello),
        request(ShimRequest::Signal {
            to: ProcessTarget::Exec("a".to_owned(), "e".to_owned()),
            signal: 15,
            scope: kind,
        }),
        request(ShimRequest::Resize { of: ProcessTarget::Container("a".to_owned()), columns: 80, rows: 25 }),
        request(ShimRequest::Attach { container: "a".to_owned(), stdin: true }),
        request(ShimRequest::ReopenLog("a".to_owned())),
        request(ShimRequest::Forget("a".to_owned())),
        request(ShimRequest::Shutdown),
        wire::write(DatagramKind::Reply, 1, &Reply::Done).expect("short"),
    ];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut dice = move |sides: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).expect("31 bits") % sides
    };
    for _ in 0..300 {
        let socket = socket::connect(rig.folder.path()).expect("connected");
        let (_end, sent) = pipe();
        for _ in 0..8 {
            let mut bytes = seeds[dice(seeds.len())].clone();
            // The header mostly stays valid, so that the body is parsed.
            let at = if dice(4) == 0 { dice(bytes.len()) } else { 16 + dice(bytes.len() - 16) };
            bytes[at] = u8::try_from(dice(256)).expect("a byte");
            let fds = [sent.as_fd(), sent.as_fd(), sent.as_fd()];
            match socket::send(socket.as_fd(), &bytes, &fds[..dice(4)]) {
                Ok(true) => {}
                Ok(false) => break,
                // The shim closed the connection, perhaps with unread data of ours.
                Err(e) if matches!(e.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => break,
                Err(e) => panic!("{e}"),
            }
        }
        // The listen backlog is finite.
        until(|| match socket::receive(socket.as_fd()) {
            Ok(socket::ReceiveResult::Nothing) => None,
            _ => Some(()),
        })
        .await;
    }
    rig.again().await;
    let reported: Vec<_> = rig.hello.containers.iter().map(|container| (container.started, container.exit)).collect();
    assert_eq!(reported, [(started, None)]);
    rig.kill("a").await;
    assert_eq!(of(&rig.event().await), ("a", 137));
}

async fn plans_may_be_long() {
    let mut rig = Fixture::new().await;
    let mut long = rig.plan("a", "exit 3");
    long.process.env = (0..9000).map(|i| format!("V{i}={}", "x".repeat(100))).collect();
    rig.shim.launch(long.clone()).await.expect("launched");
    assert_eq!(of(&rig.event().await), ("a", 3));
    long.process.env.extend(long.process.env.clone());
    let refused = rig.shim.launch(long).await.expect_err("too long");
    assert!(matches!(refused, client::ShimError::Wire(wire::WireError::Long(_))), "{refused}");
}

async fn a_start_goes_on_without_a_client() {
    let mut rig = Fixture::new().await;
    let shim = rig.shim.clone();
    let slow = LaunchPlan { limit_ms: 1000, ..plans::plain("a", &["slow"]) };
    let asked = tokio::spawn(async move { shim.launch(slow).await });
    let children = format!("/proc/{0}/task/{0}/children", rig.pid);
    until(|| (!fs::read_to_string(&children).expect("children").is_empty()).then_some(())).await;
    rig.again().await;
    assert!(asked.await.expect("ran").expect_err("cut off").is_lost());
    assert_eq!(rig.hello.starting, ["a"]);
    until(|| fs::read_to_string(&children).expect("children").is_empty().then_some(())).await;
    rig.again().await;
    assert_eq!((rig.hello.starting.len(), rig.hello.containers.len()), (0, 0));
}

/// Neither memory nor descriptors grow with the number of processes. (AC-09a-X20, for the shim's part.)
async fn nothing_grows_with_the_number_of_processes() {
    let mut rig = Fixture::new().await;
    rig.launch("a", "exec sleep 1000").await;
    let before = rig.memory("RssAnon");
    for round in 0..200 {
        let (_, output) = rig.exec("a", &format!("e{round}"), "echo x").await.expect("started");
        assert_eq!(read_all(output).await, "x\n");
        let event = rig.event().await;
        rig.shim.acknowledge(event.number).await.expect("acknowledged");
    }
    let fds = fs::read_dir(format!("/proc/{}/fd", rig.pid)).expect("descriptors").count();
    assert!(fds < 20, "{fds} descriptors");
    let after = rig.memory("RssAnon");
    assert!(after < before + 200, "{before} kB grew to {after} kB");
}
