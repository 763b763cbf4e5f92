//! Reading and following container logs, also across rotation.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use berth::logs::{LogOptions, LogsConfig, ReadError};
use futures::Sink;
use tokio::sync::Notify;
use tonic::Code;

use crate::logs::{Fixture, line};
use berth_testkit::scripted_cri::Fault;

/// Collects written bytes, with waits for their content.
#[derive(Clone, Default)]
struct BufferSink {
    bytes: Arc<Mutex<Vec<u8>>>,
    largest: Arc<Mutex<usize>>,
    keep: bool,
    total: Arc<Mutex<usize>>,
    more: Arc<Notify>,
}

impl BufferSink {
    fn new() -> Self {
        Self { keep: true, ..Self::default() }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes.lock().expect("whole").clone()).expect("text")
    }

    async fn until(&self, what: &str, test: impl Fn(&str) -> bool) {
        let wait = async {
            loop {
                let more = self.more.notified();
                if test(&self.text()) {
                    return;
                }
                more.await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), wait).await.is_err() {
            panic!("{what}: {}", self.text());
        }
    }
}

impl Sink<Vec<u8>> for BufferSink {
    type Error = std::io::Error;

    fn poll_ready(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn start_send(self: Pin<&mut Self>, bytes: Vec<u8>) -> std::io::Result<()> {
        if self.keep {
            self.bytes.lock().expect("whole").extend_from_slice(&bytes);
        }
        *self.total.lock().expect("whole") += bytes.len();
        let mut largest = self.largest.lock().expect("whole");
        *largest = bytes.len().max(*largest);
        self.more.notify_one();
        Ok(())
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_close(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn spawn(house: &Fixture, options: LogOptions, out: &BufferSink) -> tokio::task::JoinHandle<Result<(), ReadError>> {
    let (reader, log, id, mut out) = (house.manager.reader(), house.log.clone(), house.id.clone(), out.clone());
    tokio::spawn(async move { reader.read(&log, &id, &options, &mut out).await })
}

async fn read(house: &Fixture, options: LogOptions) -> Result<String, ReadError> {
    let mut out = BufferSink::new();
    house.manager.reader().read(&house.log, &house.id, &options, &mut out).await?;
    Ok(out.text())
}

fn follow() -> LogOptions {
    LogOptions { follow: true, ..LogOptions::default() }
}

#[tokio::test]
async fn the_end_of_a_log() {
    let house = Fixture::new(LogsConfig::default()).await;
    for n in 0..1000 {
        house.write(&line(&n.to_string()));
    }
    let tail = |lines| LogOptions { tail: Some(lines), ..LogOptions::default() };
    assert_eq!(read(&house, tail(2)).await.expect("read"), "998\n999\n");
    assert_eq!(read(&house, tail(0)).await.expect("read"), "");
    assert_eq!(read(&house, LogOptions::default()).await.expect("read").lines().count(), 1000);
    let limited = LogOptions { limit_bytes: Some(5), ..LogOptions::default() };
    assert_eq!(read(&house, limited).await.expect("read"), "0\n1\n2");
}

#[tokio::test]
async fn what_cannot_be_read() {
    let house = Fixture::new(LogsConfig::default()).await;
    house.write("hello\n");
    let error = read(&house, LogOptions::default()).await.expect_err("no format").to_string();
    assert_eq!(error, "failed to get parse function: unsupported log format: \"hello\\n\"");
    fs::remove_file(&house.log).expect("removed");
    assert!(matches!(read(&house, LogOptions::default()).await, Err(ReadError::Place(_))));
    fs::create_dir(&house.log).expect("created");
    assert!(matches!(read(&house, LogOptions::default()).await, Err(ReadError::Open { .. })));
}

#[tokio::test]
async fn a_huge_line_needs_no_memory() {
    let house = Fixture::new(LogsConfig::default()).await;
    let size = 10 << 20;
    {
        let mut file = BufWriter::new(File::create(&house.log).expect("opened"));
        file.write_all(b"2026-01-01T00:00:00Z stdout F ").expect("written");
        for _ in 0..size / 1024 {
            file.write_all(&[b'x'; 1024]).expect("written");
        }
        file.write_all(b"\n").expect("written");
    }
    for options in [LogOptions::default(), LogOptions { tail: Some(1), ..LogOptions::default() }] {
        let mut out = BufferSink::default();
        house.manager.reader().read(&house.log, &house.id, &options, &mut out).await.expect("read");
        assert_eq!(*out.total.lock().expect("whole"), size + 1);
        assert!(*out.largest.lock().expect("whole") <= 64 * 1024, "passed on in pieces");
    }
}

#[tokio::test]
async fn following_begins_behind_what_is_there() {
    // AC-03b-33
    let house = Fixture::new(LogsConfig::default()).await;
    house.write(&line("old"));
    let out = BufferSink::new();
    let task = spawn(&house, LogOptions { tail: Some(0), ..follow() }, &out);
    house.cri.until("the first wait", Duration::from_secs(20), |c| c.count("container_status") > 0).await;
    house.write(&line("new"));
    out.until("the new line", |text| text == "new\n").await;
    house.cri.kill(house.id.as_str(), 0, "");
    task.await.expect("joined").expect("read");
    assert_eq!(out.text(), "new\n");
}

#[tokio::test]
async fn an_incomplete_line_is_buffered_while_following() {
    let house = Fixture::new(LogsConfig::default()).await;
    house.write(&line("one"));
    let out = BufferSink::new();
    let task = spawn(&house, follow(), &out);
    house.write("2026-01-01T00:00:00Z stdout F tw");
    out.until("the first line", |text| text == "one\n").await;
    house.cri.until("a wait", Duration::from_secs(20), |c| c.count("container_status") > 1).await;
    assert_eq!(out.text(), "one\n");
    house.write("o\n2026-01-01T00:00:00Z stdout F end");
    out.until("the second line", |text| text == "one\ntwo\n").await;
    house.cri.kill(house.id.as_str(), 0, "");
    task.await.expect("joined").expect("read");
    assert_eq!(out.text(), "one\ntwo\nend", "nothing completes it any more");
}

#[tokio::test]
async fn a_runtime_that_restarts_does_not_end_following() {
    let house = Fixture::new(LogsConfig::default()).await;
    house.cri.fault("container_status", "", Fault::Error(Code::Unavailable, "restarting".into()), Some(1));
    let out = BufferSink::new();
    let task = spawn(&house, follow(), &out);
    house.cri.until("asked twice", Duration::from_secs(20), |c| c.count("container_status") > 1).await;
    house.write(&line("still here"));
    out.until("the line", |text| text == "still here\n").await;
    house.cri.fault("container_status", "", Fault::Error(Code::NotFound, "lost".into()), None);
    assert!(matches!(task.await.expect("joined"), Err(ReadError::Runtime(error)) if error.is_not_found()));
}

#[tokio::test]
async fn a_reader_with_observed_state_does_not_query_the_runtime() {
    let house = Fixture::new(LogsConfig::default()).await;
    let runs = Arc::new(AtomicBool::new(true));
    let (out, observed) = (BufferSink::new(), runs.clone());
    let reader = house.manager.reader().with_observed_state(Arc::new(move |_| Some(observed.load(Ordering::SeqCst))));
    let (log, id, mut to) = (house.log.clone(), house.id.clone(), out.clone());
    let task = tokio::spawn(async move { reader.read(&log, &id, &follow(), &mut to).await });
    for n in 0..10 {
        house.write(&line(&n.to_string()));
        out.until("the line", |text| text.ends_with(&format!("{n}\n"))).await;
    }
    runs.store(false, Ordering::SeqCst);
    house.write(&line("last"));
    task.await.expect("joined").expect("read");
    assert!(out.text().ends_with("9\nlast\n"), "what was written before the end is read");
    assert_eq!(house.cri.count("container_status"), 1, "a rumour is checked now and then");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_doubled_across_rotation() {
    // AC-03b-35: the writer keeps using the old file for a while after the rename, as a runtime does until it has
    // reopened the log.
    let house = Fixture::new(LogsConfig::default()).await;
    let out = BufferSink::new();
    let task = spawn(&house, follow(), &out);
    house.cri.until("the first wait", Duration::from_secs(20), |c| c.count("container_status") > 0).await;
    let (log, stop) = (house.log.clone(), Arc::new(AtomicBool::new(false)));
    let ended = stop.clone();
    let writer = std::thread::spawn(move || {
        let open = || fs::OpenOptions::new().append(true).create(true).open(&log).expect("opened");
        let (mut file, mut written) = (open(), 0_u32);
        for rotation in 0..8 {
            for at in 0..400 {
                if at == 200 {
                    fs::rename(&log, log.with_file_name(format!("0.log.2026010{rotation}-000000"))).expect("renamed");
                }
                file.write_all(line(&written.to_string()).as_bytes()).expect("written");
                written += 1;
                if at % 50 == 0 {
                    std::thread::yield_now();
                }
            }
            file = open();
        }
        ended.store(true, Ordering::SeqCst);
        written
    });
    let written = tokio::task::spawn_blocking(|| writer.join().expect("written")).await.expect("joined");
    assert!(stop.load(Ordering::SeqCst));
    out.until("everything", |text| text.lines().count() >= written as usize).await;
    house.cri.kill(house.id.as_str(), 0, "");
    task.await.expect("joined").expect("read");
    let wanted: String = (0..written).map(|n| format!("{n}\n")).collect();
    assert_eq!(out.text(), wanted);
}
