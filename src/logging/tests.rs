//! Tests of the agent log: text and JSON lines, verbosity, and streams.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use regex_lite::Regex;
use tracing::{debug, error, info, info_span, trace, warn};

use super::*;
use berth_config::{
    defaults,
    fields::{LoggingConfiguration, VModuleItem},
};

/// Writer that keeps its output in memory.
#[derive(Clone, Default)]
struct MemoryWriter(Arc<Mutex<Vec<u8>>>);

impl MemoryWriter {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no writer panicked").clone()).expect("text")
    }
}

impl Write for MemoryWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no writer panicked").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn config(change: impl FnOnce(&mut LoggingConfiguration)) -> LoggingConfiguration {
    let mut config = defaults::defaults().logging;
    change(&mut config);
    config
}

fn written(config: &LoggingConfiguration, emit: impl FnOnce(&LogHandle)) -> String {
    let paper = MemoryWriter::default();
    let (subscriber, handle) = subscriber(config, OutputStreams::single(Box::new(paper.clone())));
    tracing::subscriber::with_default(subscriber, || emit(&handle));
    paper.text()
}

/// Lines without their klog headers.
fn bodies(text: &str) -> Vec<&str> {
    text.lines().map(|line| line.split_once("] ").map_or(line, |(_, body)| body)).collect()
}

#[test]
fn a_text_line_has_klog_s_header() {
    let text = written(&config(|_| {}), |_| {
        error!(err = "boom", "command failed");
        warn!("careful");
        info!("fine");
    });
    let header = Regex::new(r"^[EWI]\d{4} \d\d:\d\d:\d\d\.\d{6} [ \d]{7} tests\.rs:\d+\] ").expect("a regex");
    assert!(text.lines().all(|line| header.is_match(line)), "{text}");
    assert_eq!(text.lines().map(|line| &line[..1]).collect::<String>(), "EWI");
    assert_eq!(bodies(&text), ["\"command failed\" err=\"boom\"", "\"careful\"", "\"fine\""]);
}

#[test]
fn values_are_written_as_klog_writes_them() {
    let text = written(&config(|_| {}), |_| {
        info!(pod = "ns/a", exitCode = -1, done = true, name = %"q\"uote", pods = ?["ns/a", "ns/b"], "Said");
        error!(output = "one\ntwo", err = "e", "Failed");
        let span = info_span!("sync", pod = "ns/a", podUID = "u1");
        let _entered = span.enter();
        info!(podUID = "u2", pod = "ns/a", "In a span");
    });
    assert_eq!(
        bodies(&text),
        [
            "\"Said\" pod=\"ns/a\" exitCode=-1 done=true name=\"q\\\"uote\" pods=[\"ns/a\",\"ns/b\"]",
            "\"Failed\" err=\"e\" output=<",
            "\tone",
            "\ttwo",
            " >",
            "\"In a span\" pod=\"ns/a\" podUID=\"u2\"",
        ]
    );
}

/// AC-01-41, AC-08-25.
#[test]
fn json_lines_are_objects() {
    let text = written(&config(|c| c.format = "json".to_owned()), |_| {
        info!(kubeletVersion = "v1.36.2", "Kubelet version");
        error!(err = "boom", pod = "ns/a", count = 2, "Failed");
        info!(v = 0, pods = ?["ns/a"], "Listed");
    });
    let lines: Vec<serde_json::Value> =
        text.lines().map(|l| serde_json::from_str(l).expect("AC-01-41: JSON")).collect();
    assert_eq!(lines.len(), 3);
    for line in &lines {
        assert!(line["ts"].is_f64() && line["caller"].as_str().is_some_and(|c| c.starts_with("logging/tests.rs:")));
    }
    assert_eq!((&lines[0]["msg"], &lines[0]["v"]), (&"Kubelet version".into(), &0.into()));
    assert_eq!(lines[0]["kubeletVersion"], "v1.36.2");
    assert!(text.starts_with("{\"ts\":"));
    assert_eq!((&lines[1]["err"], lines[1].get("v")), (&"boom".into(), None));
    assert_eq!(lines[1]["pod"], serde_json::json!({"name": "a", "namespace": "ns"}));
    assert_eq!(lines[1]["count"], 2);
    assert_eq!(lines[2]["pods"], serde_json::json!([{"name": "a", "namespace": "ns"}]));
}

#[test]
fn records_of_all_crates_of_the_workspace_are_written() {
    let text = written(&config(|_| {}), |_| {
        info!(target: "berth_sys::netlink::links", "of a crate");
        info!(target: "h2::codec", "foreign");
    });
    assert_eq!(bodies(&text), ["\"of a crate\""]);
}

#[test]
fn verbosity_decides_and_can_be_changed() {
    let emit = || {
        info!("v0");
        info!(v = 2, "v2");
        debug!("v4");
        trace!("v6");
        warn!(v = 9, "always");
        info!(target: "h2::codec", "foreign");
    };
    let at = |level: u32| {
        let text = written(&config(|c| c.verbosity = level), |_| emit());
        bodies(&text).iter().map(|body| body.trim_matches('"').to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(at(0), ["v0", "always"]);
    assert_eq!(at(2), ["v0", "v2", "always"]);
    assert_eq!(at(4), ["v0", "v2", "v4", "always", "foreign"]);
    assert_eq!(at(6), ["v0", "v2", "v4", "v6", "always", "foreign"]);
    let text = written(&config(|_| {}), |handle| {
        handle.set_verbosity(2);
        assert_eq!(handle.verbosity(), 2);
        emit();
    });
    assert!(text.contains("v2"));
    let item = VModuleItem { file_pattern: "test*".to_owned(), verbosity: 4 };
    let text = written(&config(|c| c.vmodule = vec![item]), |_| emit());
    assert!(text.contains("v4") && !text.contains("v6"));
}

#[test]
fn split_streams_part_errors_from_the_rest() {
    let (out, err) = (MemoryWriter::default(), MemoryWriter::default());
    let streams = OutputStreams::pair(Box::new(out.clone()), Box::new(err.clone()));
    let (subscriber, handle) = subscriber(&config(|_| {}), streams);
    tracing::subscriber::with_default(subscriber, || {
        info!("fine");
        warn!("careful");
        error!("broken");
    });
    handle.flush().expect("paper is patient");
    assert_eq!((bodies(&out.text()), bodies(&err.text())), (vec!["\"fine\"", "\"careful\""], vec!["\"broken\""]));
    assert!(handle.since_flush() < Duration::from_secs(60));
}

/// Writer that counts its flushes.
#[derive(Clone)]
struct Sink(tokio::sync::watch::Sender<u32>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.send_modify(|flushes| *flushes += 1);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn the_log_is_flushed_before_the_watchdog_misses_it() {
    for (period, each) in [(5, 5), (60, 60), (600, 60), (u64::MAX, 60)] {
        let sink = Sink(tokio::sync::watch::Sender::new(0));
        let (_, handle) = subscriber(&config(|_| {}), OutputStreams::single(Box::new(sink.clone())));
        let stop = CancellationToken::new();
        let began = tokio::time::Instant::now();
        let task = tokio::spawn(handle.keep_flushing(Duration::from_secs(period), stop.clone()));
        let mut flushes = sink.0.subscribe();
        tokio::time::timeout(Duration::from_secs(3600), flushes.wait_for(|flushes| *flushes == 4))
            .await
            .unwrap_or_else(|_| panic!("{period} s: not flushed"))
            .expect("the sink lives");
        assert_eq!(began.elapsed().as_secs(), 3 * each, "{period} s: the first flush is at once");
        stop.cancel();
        task.await.expect("it ends");
    }
}
