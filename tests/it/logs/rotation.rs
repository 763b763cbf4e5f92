//! Container log rotation, log links, and their removal.

use std::{collections::HashSet, fs, io::Read, os::unix::fs::PermissionsExt, sync::Arc, time::Duration};

use berth::logs::{LogsConfig, RunningLog, RunningLogs};
use berth_ports::{ContainerLogFile, ContainerLogs};
use berth_types::PodRef;
use flate2::read::GzDecoder;
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::logs::{Fixture, line, who};
use berth_testkit::scripted_cri::Fault;

fn small(max_files: usize) -> LogsConfig {
    LogsConfig { max_size: Some(100), max_files, ..LogsConfig::default() }
}

impl Fixture {
    /// Names in the log's directory, sorted.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.log.parent().expect("a parent")).expect("read");
        let mut names: Vec<String> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    fn read_file(&self, name: &str) -> String {
        let bytes = fs::read(self.log.with_file_name(name)).expect("read");
        if !name.ends_with(".gz") {
            return String::from_utf8(bytes).expect("text");
        }
        let mut text = String::new();
        GzDecoder::new(&bytes[..]).read_to_string(&mut text).expect("packed");
        text
    }

    /// Starts rotation of the log for as long as the container runs.
    fn rotation(&self) -> Option<JoinHandle<()>> {
        let cri = self.cri.clone();
        let log = RunningLog { container: self.id.clone(), path: self.log.clone() };
        let runs = move || !cri.running("web", "main").is_empty();
        let running: RunningLogs = Box::new(move || if runs() { vec![log.clone()] } else { Vec::new() });
        self.manager.start_rotation(running, CancellationToken::new())
    }

    fn file(&self) -> ContainerLogFile {
        ContainerLogFile { pod: who(), container: "main".into(), id: self.id.clone(), path: self.log.clone() }
    }
}

/// Longer than one round of rotation.
async fn round() {
    sleep(Duration::from_secs(10)).await;
    sleep(Duration::from_millis(100)).await;
}

#[tokio::test(start_paused = true)]
async fn three_rotations_of_three_files() {
    // AC-03b-36
    let house = Fixture::new(small(3)).await;
    let _task = house.rotation().expect("on");
    for text in ["first", "second", "third"] {
        house.write(&line(&format!("{text}{}", ".".repeat(100))));
        fs::set_permissions(&house.log, fs::Permissions::from_mode(0o640)).expect("set");
        round().await;
    }
    house.write(&line("current"));
    let names = house.names();
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(names[0], "0.log");
    assert!(
        names[1].starts_with("0.log.20")
            && names[1].ends_with(".gz")
            && names[1].len() == "0.log.20260101-000010.gz".len()
    );
    assert!(names[2].starts_with("0.log.20") && names[2].len() == "0.log.20260101-000010".len());
    assert!(house.read_file(&names[0]).contains("current"));
    assert!(house.read_file(&names[1]).contains("second"), "the oldest went");
    assert!(house.read_file(&names[2]).contains("third"));
    let mode = fs::metadata(house.log.with_file_name(&names[1])).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640, "the mode stays");
    let files = house.manager.files(&house.log).await;
    let found: Vec<_> = files.iter().filter_map(|f| f.file_name()?.to_str()).collect();
    assert_eq!(found, [&names[1], &names[2], &names[0]], "oldest first");
}

#[tokio::test(start_paused = true)]
async fn what_is_rotated_is_named_later_than_all_there_is() {
    let house = Fixture::new(small(3)).await;
    fs::write(house.log.with_file_name("0.log.20991231-235959"), "old").expect("written");
    let _task = house.rotation().expect("on");
    let written = line(&format!("just written{}", ".".repeat(100)));
    house.write(&written);
    round().await;
    assert_eq!(house.read_file("0.log.21000101-000000"), written, "{:?}", house.names());
}

/// Waits for a number of files, in real time; the timeout is far below the round interval.
async fn until_names(house: &Fixture, count: usize) {
    let wait = async {
        while house.names().len() != count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("in time");
}

/// In real time: the next round is an hour away.
#[tokio::test]
async fn a_log_that_is_written_to_is_not_left_until_the_next_round() {
    let house = Fixture::new(LogsConfig { monitor_interval: Duration::from_secs(3600), ..small(4) }).await;
    house.write(&line("before"));
    let _task = house.rotation().expect("on");
    for count in 2..=4 {
        house.write(&line(&format!("{count}{}", ".".repeat(200))));
        until_names(&house, count).await;
        house.write(&line("the next file"));
    }
    // Rotated files are compressed afterwards.
    let packed = async {
        while house.names().iter().filter(|name| name.ends_with(".gz")).count() != 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), packed).await.expect("in time");
    assert!(house.read_file("0.log").contains("the next file"));
    let oldest = house.names().into_iter().find(|name| name.ends_with(".gz")).expect("there");
    assert!(house.read_file(&oldest).contains("before"));
}

#[tokio::test(start_paused = true)]
async fn a_log_that_is_small_or_of_no_running_container_stays() {
    let house = Fixture::new(small(3)).await;
    let _task = house.rotation().expect("on");
    house.write(&line("short"));
    house.cri.clear_calls();
    round().await;
    house.cri.kill(house.id.as_str(), 0, "");
    house.write(&line(&".".repeat(200)));
    round().await;
    assert_eq!(house.names(), ["0.log"]);
    assert!(house.cri.calls().is_empty(), "the runtime is not called");
}

#[tokio::test(start_paused = true)]
async fn a_failed_reopen_restores_the_name() {
    // AC-03b-37
    let house = Fixture::new(small(3)).await;
    let _task = house.rotation().expect("on");
    house.cri.fault("reopen_container_log", "", Fault::Error(Code::Internal, "no".into()), Some(1));
    house.write(&line(&".".repeat(200)));
    // The log is full, so rotation is tried at once; and again in the next round, not before.
    sleep(Duration::from_secs(5)).await;
    assert_eq!(house.cri.count("reopen_container_log"), 1);
    assert_eq!((house.names(), house.read_file("0.log").len() > 200), (vec!["0.log".to_owned()], true));
    round().await;
    assert_eq!(house.names().len(), 2, "tried again");
}

#[tokio::test(start_paused = true)]
async fn a_reopen_that_worked_but_was_reported_as_failed_loses_nothing() {
    let house = Fixture::new(small(3)).await;
    let _task = house.rotation().expect("on");
    house.cri.fault("reopen_container_log", "", Fault::ErrorAfter(Code::DeadlineExceeded, "late".into()), Some(1));
    house.write(&line(&".".repeat(200)));
    round().await;
    assert_eq!(house.names().len(), 2, "{:?}", house.names());
    assert_eq!(house.read_file("0.log"), "");
}

#[tokio::test(start_paused = true)]
async fn a_log_that_is_missing_is_opened_again() {
    let house = Fixture::new(small(3)).await;
    fs::remove_file(&house.log).expect("removed");
    let _task = house.rotation().expect("on");
    round().await;
    assert_eq!(house.names(), ["0.log"]);
}

#[tokio::test]
async fn rotation_can_be_off() {
    for size in [None, Some(0)] {
        let house = Fixture::new(LogsConfig { max_size: size, ..LogsConfig::default() }).await;
        assert!(house.rotation().is_none());
    }
}

#[tokio::test]
async fn a_log_and_its_link_come_and_go_together() {
    let house = Fixture::new(LogsConfig::default()).await;
    let link = house.root.path().join(format!("containers/web_default_main-{}.log", house.id));
    house.manager.link(house.file()).await;
    assert_eq!(fs::read_link(&link).expect("a link"), house.log);
    fs::write(house.log.with_file_name("0.log.20260101-000000.gz"), "x").expect("written");
    house.manager.remove(house.file()).await.expect("removed");
    assert!(house.names().is_empty() && fs::symlink_metadata(&link).is_err());
    house.manager.remove(house.file()).await.expect("idempotent");
}

#[tokio::test]
async fn dead_links_and_directories_of_gone_pods_are_removed() {
    let house = Fixture::new(LogsConfig::default()).await;
    house.manager.link(house.file()).await;
    let link = house.root.path().join(format!("containers/web_default_main-{}.log", house.id));
    fs::remove_file(&house.log).expect("removed");
    house.manager.remove_dangling_links(HashSet::from([house.id.clone()])).await;
    assert!(fs::symlink_metadata(&link).is_ok(), "between rename and reopen");
    house.manager.remove_dangling_links(HashSet::new()).await;
    assert!(fs::symlink_metadata(&link).is_err());

    let pods = house.root.path().join("pods");
    let pod = |name: &str| PodRef { uid: "uid-own".into(), name: name.into(), namespace: "default".into() };
    fs::create_dir_all(pods.join("default_own_uid-own/main")).expect("created");
    house.manager.remove_directory(pod("own")).await.expect("removed");
    assert!(!pods.join("default_own_uid-own").exists());
    house.manager.remove_directory(pod("own")).await.expect("idempotent");
    // Names of pods that only the runtime knows are untrusted.
    house.manager.remove_directory(pod("/../../pods")).await.expect_err("leads elsewhere");
    assert!(pods.exists());
    fs::create_dir_all(pods.join("default_old_uid-old/main")).expect("created");
    fs::create_dir_all(pods.join("lost+found")).expect("created");
    house.manager.remove_directories(Arc::new(|uid| uid.as_str() == "uid-old")).await;
    assert!(!pods.join("default_old_uid-old").exists());
    assert!(pods.join("default_web_uid-web").exists() && pods.join("lost+found").exists());
}

/// Number of uncompressed rotated files of the log.
fn rotated(house: &Fixture) -> usize {
    house.names().iter().filter(|name| name.starts_with("0.log.") && !name.ends_with(".gz")).count()
}

#[tokio::test(start_paused = true)]
async fn where_nothing_is_reopened_nothing_is_deleted() {
    let house = Fixture::new(small(2)).await;
    let old = house.log.with_file_name("0.log.20200101-000000.gz");
    fs::write(&old, "old").expect("written");
    let _task = house.rotation().expect("on");
    house.cri.fault("reopen_container_log", "", Fault::Error(Code::NotFound, "it has ended".into()), Some(1));
    house.write(&line(&".".repeat(200)));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(house.cri.count("reopen_container_log"), 1);
    assert!(old.exists(), "{:?}", house.names());
    round().await;
    assert!(!old.exists() && rotated(&house) == 1, "another took its place: {:?}", house.names());
}

/// In real time.
#[tokio::test]
async fn runtime_calls_that_hang_stop_no_other_log() {
    let interval = Duration::from_millis(200);
    // With the single worker of the default.
    let house = Fixture::new(LogsConfig { monitor_interval: interval, ..small(5) }).await;
    let other = house.log.with_file_name("other.log");
    let mut logs = vec![RunningLog { container: house.id.clone(), path: other.clone() }];
    let (end, ends) = (CancellationToken::new(), CancellationToken::new());
    let hanging = ["hangs-0", "hangs-1", "hangs-2"];
    for id in hanging {
        house.cri.fault("reopen_container_log", id, Fault::Blocked(ends.clone()), None);
        let path = house.log.with_file_name(format!("{id}.log"));
        fs::write(&path, ".".repeat(200)).expect("written");
        logs.push(RunningLog { container: id.into(), path });
    }
    let task = house.manager.start_rotation(Box::new(move || logs.clone()), end.clone()).expect("on");
    let until = async |what: &str, is_so: &dyn Fn() -> bool| {
        let wait = async {
            while !is_so() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect(what);
    };
    let asked = || house.cri.targets("reopen_container_log");
    until("they hang together", &|| hanging.iter().all(|hangs| asked().iter().any(|id| id == hangs))).await;
    for count in 1..=3 {
        fs::write(&other, ".".repeat(200)).expect("written");
        until("the other goes on", &|| {
            let names: HashSet<String> = house.names().iter().map(|name| name.replace(".gz", "")).collect();
            names.iter().filter(|name| name.starts_with("other.log.") && !name.ends_with(".tmp")).count() >= count
        })
        .await;
    }
    end.cancel();
    assert!(!task.is_finished(), "what was begun is ended");
    ends.cancel();
    tokio::time::timeout(Duration::from_secs(60), task).await.expect("in time").expect("no panic");
}
