//! Readings of cgroup v1 and v2 hierarchies laid out in a temporary directory.

use std::{fs, path::Path, sync::atomic::AtomicI64};

use super::*;
use crate::reading::CpuShare;

struct Below(&'static str);

impl PodCgroupPaths for Below {
    fn above(&self) -> Vec<String> {
        vec!["/kubepods".to_owned()]
    }

    fn of_pod(&self, pod: &PodUid) -> Vec<String> {
        vec![format!("/elsewhere/pod{pod}"), format!("{}/pod{pod}", self.0)]
    }
}

fn lay(root: &Path, group: &str, files: &[(&str, &str)]) {
    let directory = root.join(group.trim_start_matches('/'));
    fs::create_dir_all(&directory).expect("a directory");
    for (name, content) in files {
        fs::write(directory.join(name), content).expect("written");
    }
}

fn reader(mounts: Mounts, max_open: usize) -> CgroupReader {
    CgroupReader::new(mounts, Arc::new(Below("/kubepods")), max_open)
}

fn at(path: &str, depth: Depth) -> CgroupRequest {
    CgroupRequest { key: CgroupKey::At(path.into()), depth: Some(depth) }
}

const MACHINE: MachineMemory = MachineMemory { total: 1000, available: 500, swap_total: 100, swap_free: 40 };

#[test]
fn a_group_of_the_unified_hierarchy() {
    let root = tempfile::tempdir().expect("a directory");
    lay(
        root.path(),
        "/kubepods/podu",
        &[
            ("cpu.stat", "usage_usec 1000000\nuser_usec 600000\nsystem_usec 400000\nnr_periods 5\n"),
            ("memory.current", "100\n"),
            ("memory.stat", "anon 60\nfile 30\ninactive_file 10\npgfault 3\n"),
            ("memory.swap.current", "10\n"),
            ("memory.max", "max\n"),
            ("memory.swap.max", "15\n"),
            ("cpu.max", "50000 100000\n"),
            ("cpu.weight", "39\n"),
            ("cgroup.procs", "17\n18\n"),
            ("pids.current", "4\n"),
            ("pids.max", "max\n"),
            ("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n"),
        ],
    );
    lay(root.path(), "/kubepods/podu/c1", &[("cpu.stat", "usage_usec 7\n")]);
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 100);
    let uid = PodUid::from("u");
    let wanted = |key, depth| CgroupRequest { key, depth: Some(depth) };
    let all = [
        wanted(CgroupKey::Pod(uid.clone()), Depth::Full),
        wanted(CgroupKey::Container(uid.clone(), "c1".into()), Depth::Core),
        wanted(CgroupKey::Container(uid.clone(), "c2".into()), Depth::Core),
    ];
    let clock = AtomicI64::new(1_000_000_000);
    let seen = reader.pass(&all, MACHINE, &|| clock.load(Ordering::Relaxed));
    let pod = seen[0].as_ref().expect("there");
    assert_eq!(&*pod.path, "/kubepods/podu");
    let reading = &pod.reading;
    let cpu = reading.cpu.expect("read");
    assert_eq!((cpu.times.usage_ns, cpu.rate, cpu.throttling.periods), (1_000_000_000, None, 5));
    let memory = reading.memory.expect("read");
    assert_eq!((memory.working_set(), memory.available(), memory.swap_available()), (90, None, Some(5)));
    assert_eq!(reading.share, Some(CpuShare { shares: 998, quota: Some(50_000), period: 100_000 }));
    assert_eq!((reading.processes, reading.outer_processes, reading.threads), (Some(2), Some((17, 18)), Some((4, 0))));
    assert!(reading.pressure.cpu.is_none() && reading.pressure.memory.is_some() && reading.created_at > 0);
    assert_eq!(&*seen[1].as_ref().expect("there").path, "/kubepods/podu/c1");
    assert_eq!(seen[2], None);
    assert_eq!(reader.size(), (2, 8), "settings need not stay open");

    // The second reading yields rates, from files that stayed open.
    fs::write(root.path().join("kubepods/podu/cpu.stat"), "usage_usec 1500000\n").expect("written");
    clock.store(2_000_000_000, Ordering::Relaxed);
    let seen = reader.pass(&all[..1], MACHINE, &|| clock.load(Ordering::Relaxed));
    let rate = seen[0].as_ref().and_then(|pod| pod.reading.cpu).and_then(|cpu| cpu.rate);
    assert_eq!(rate, Some(500_000_000));
    assert_eq!(reader.size(), (1, 7), "what is not named is closed");
    reader.close();
    assert_eq!(reader.size(), (0, 0));
}

#[test]
fn a_deeper_read_adds_only_the_missing_values() {
    let root = tempfile::tempdir().expect("a directory");
    let files = |usage: &str, processes: &str| {
        // In another directory, because changes of kernel counters must not raise inotify events.
        let all = [("cpu.stat", usage), ("cgroup.procs", processes), ("pids.current", "4\n")];
        lay(root.path(), "/kernel", &all);
        lay(root.path(), "/a", &[]);
        for (name, _) in all {
            let _ = std::os::unix::fs::symlink(root.path().join("kernel").join(name), root.path().join("a").join(name)); // once
        }
    };
    files("usage_usec 5\n", "1\n");
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
    let mut read = |depth, at_ms: i64| {
        let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| at_ms * 1_000_000);
        let reading = seen[0].as_ref().expect("there").reading.clone();
        let usage = reading.cpu.expect("read").times.usage_ns / 1000;
        (reading.at / 1_000_000, usage, reading.processes, reading.threads.map(|t| t.0))
    };
    assert_eq!(read(Depth::Core, 1000), (1000, 5, None, None));
    files("usage_usec 6\n", "1\n2\n");
    assert_eq!(read(Depth::Summary, 1500), (1000, 5, Some(2), None), "completed, and as old as it began");
    files("usage_usec 7\n", "1\n");
    assert_eq!(read(Depth::Full, 2000), (1000, 5, Some(2), Some(4)));
    assert_eq!(read(Depth::Core, 2000), (2000, 7, None, None), "what is complete is not added to");
    assert_eq!(read(Depth::Core, 2001), (2001, 7, None, None), "as deep is as new");
    assert_eq!(read(Depth::Full, 3002), (3002, 7, Some(1), Some(4)), "too old");
}

#[test]
fn an_idle_group_is_read_whole_every_few_minutes() {
    let root = tempfile::tempdir().expect("a directory");
    lay(root.path(), "/a", &[]);
    let file = |name: &str, text: &str| {
        // In another directory, because changes of kernel counters must not raise inotify events.
        lay(root.path(), "/kernel", &[(name, text)]);
        let _ = std::os::unix::fs::symlink(root.path().join("kernel").join(name), root.path().join("a").join(name)); // once
    };
    file("cpu.stat", "usage_usec 5\n");
    file("memory.current", "10\n");
    file("memory.peak", "20\n");
    file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n");
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
    let mut read = |depth, second: i64| {
        let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| second * 1_000_000_000);
        let reading = seen[0].as_ref().expect("there").reading.clone();
        let stalled = reading.pressure.memory.map(|pressure| pressure.some.total);
        (reading.at / 1_000_000_000, reading.memory.map(|memory| memory.peak), stalled)
    };
    assert_eq!(read(Depth::Full, 100), (100, Some(20), Some(5)));
    file("memory.peak", "30\n");
    file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=6\n");
    assert_eq!(read(Depth::Full, 115), (115, Some(20), Some(6)), "nothing ran, but something waited");
    file("cpu.stat", "usage_usec 6\n");
    assert_eq!(read(Depth::Full, 130), (130, Some(30), Some(6)), "something ran");
    file("memory.peak", "40\n");
    assert_eq!(read(Depth::Full, 309).1, Some(30));
    assert_eq!(read(Depth::Core, 311).1, Some(30), "the next complete reading refreshes it");
    assert_eq!(read(Depth::Full, 313).1, Some(40), "three minutes are over");
    file("memory.peak", "50\n");
    file("memory.current", "11\n");
    assert_eq!(read(Depth::Full, 315).1, Some(50), "its memory is another");
    assert_eq!(read(Depth::Core, 320).0, 320);
    file("cpu.stat", "usage_usec 7\n");
    file("memory.peak", "60\n");
    file("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n");
    assert_eq!(read(Depth::Full, 321), (320, Some(50), Some(7)), "a look at one that rested is completed");
    assert_eq!(read(Depth::Full, 323), (323, Some(60), Some(7)));
}

#[test]
fn many_groups_are_read_as_few_are() {
    let root = tempfile::tempdir().expect("a directory");
    for n in 0..2 * WORTH_A_THREAD {
        lay(root.path(), &format!("/g{n}"), &[("cpu.stat", &format!("usage_usec {n}\n"))]);
    }
    let mut wanted: Vec<CgroupRequest> = (0..2 * WORTH_A_THREAD).map(|n| at(&format!("/g{n}"), Depth::Core)).collect();
    wanted.extend([at("/absent", Depth::Core), at("/g7", Depth::Core)]);
    let usages = |reader: &mut CgroupReader| -> Vec<Option<u64>> {
        let seen = reader.pass(&wanted, MACHINE, &|| 1);
        let usage = |seen: &Option<CgroupObservation>| Some(seen.as_ref()?.reading.cpu?.times.usage_ns / 1000);
        seen.iter().map(usage).collect()
    };
    let mut expected: Vec<Option<u64>> = (0..2 * WORTH_A_THREAD).map(|n| u64::try_from(n).ok()).collect();
    expected.extend([None, Some(7)]);
    let mounts = || Mounts::Unified(root.path().to_owned());
    let mut bounded = reader(mounts(), 100);
    bounded.processors = 2;
    assert_eq!(usages(&mut bounded), expected);
    assert_eq!(bounded.size(), (2 * WORTH_A_THREAD, 100), "no more files are open than may be");

    let mut forgetful = reader(mounts(), 0);
    forgetful.processors = 2;
    assert_eq!(usages(&mut forgetful), expected);
    fs::remove_dir_all(root.path().join("g3")).expect("removed");
    fs::remove_dir_all(root.path().join("g100")).expect("removed");
    lay(root.path(), "/g100", &[("cpu.stat", "usage_usec 1000\n")]);
    (expected[3], expected[100]) = (None, Some(1000));
    assert_eq!(usages(&mut forgetful), expected, "gone, and made again");
}

#[test]
fn settings_are_read_when_they_were_written() {
    let root = tempfile::tempdir().expect("a directory");
    lay(root.path(), "/a", &[("cpu.stat", "usage_usec 5\n"), ("memory.current", "10\n"), ("memory.max", "100\n")]);
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
    let mut limit = |depth, second: i64| {
        let seen = reader.pass(&[at("/a", depth)], MACHINE, &|| second * 1_000_000_000);
        let reading = seen[0].as_ref().expect("there").reading.clone();
        (reading.memory.map(|memory| memory.limit), reading.share.map(|share| share.shares))
    };
    assert_eq!(limit(Depth::Core, 10), (Some(100), None));
    lay(root.path(), "/a", &[("memory.max", "200\n"), ("cpu.weight", "1\n"), ("cpu.max", "max 100000\n")]);
    assert_eq!(limit(Depth::Full, 20), (Some(200), Some(2)), "written, and deeper");
    assert_eq!(limit(Depth::Core, 30), (Some(200), None));
    lay(root.path(), "/a", &[("cpu.weight", "100\n")]);
    assert_eq!(limit(Depth::Full, 40), (Some(200), Some(2597)));
    assert_eq!(limit(Depth::Full, 50), (Some(200), Some(2597)));
}

#[test]
fn the_root_knows_the_machine() {
    let root = tempfile::tempdir().expect("a directory");
    lay(root.path(), "/", &[("cpu.stat", "usage_usec 5\n"), ("memory.stat", "anon 60\nfile 30\ninactive_file 10\n")]);
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 0);
    let seen = reader.pass(&[at("/", Depth::Core)], MACHINE, &|| 1);
    let memory = seen[0].as_ref().and_then(|s| s.reading.memory).expect("read");
    assert_eq!((memory.usage, memory.limit, memory.swap, memory.swap_limit), (90, 1000, 60, Some(100)));
    assert_eq!(memory.available(), Some(920));
    assert_eq!(reader.size(), (1, 0), "no room to keep anything open");
}

#[test]
fn a_group_of_the_old_hierarchies() {
    let root = tempfile::tempdir().expect("a directory");
    let tree = |name: &str| root.path().join(name);
    lay(&tree("cpu"), "/k", &[("cpu.shares", "1024"), ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")]);
    lay(&tree("cpuacct"), "/k", &[("cpuacct.usage", "77\n"), ("cpuacct.stat", "user 1\nsystem 2\n")]);
    lay(
        &tree("memory"),
        "/k",
        &[
            ("memory.usage_in_bytes", "100"),
            ("memory.stat", "total_rss 60\ntotal_inactive_file 10\ntotal_swap 3\n"),
            ("memory.limit_in_bytes", "200"),
            ("memory.memsw.limit_in_bytes", "250"),
            ("memory.failcnt", "4"),
        ],
    );
    lay(
        &tree("blkio"),
        "/k",
        &[
            ("blkio.throttle.io_service_bytes_recursive", "8:0 Read 5\nTotal 5\n"),
            ("blkio.throttle.io_serviced_recursive", "8:0 Read 1\nTotal 1\n"),
        ],
    );
    let mounts = [Some(tree("cpu")), Some(tree("cpuacct")), Some(tree("memory")), None, Some(tree("blkio"))];
    let mut reader = reader(Mounts::Old(mounts), 10);
    let seen = reader.pass(&[at("/k", Depth::Full)], MACHINE, &|| 1);
    let reading = &seen[0].as_ref().expect("there").reading;
    let memory = reading.memory.expect("read");
    assert_eq!((memory.available(), memory.swap_available(), memory.failures), (Some(110), Some(47), 4));
    assert_eq!(memory.shown_swap_limit, 250);
    assert_eq!(reading.cpu.map(|cpu| cpu.times.user_ns), Some(10_000_000));
    assert_eq!(reading.share, Some(CpuShare { shares: 1024, quota: None, period: 100_000 }));
    assert_eq!(reading.devices.first().map(|io| (io.read_bytes, io.reads)), Some((5, 1)));
}

#[test]
fn a_group_that_goes_and_comes_back_is_found_again() {
    let root = tempfile::tempdir().expect("a directory");
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
    let mut read = || reader.pass(&[at("/a", Depth::Core)], MACHINE, &|| 1)[0].is_some();
    assert!(!read());
    lay(root.path(), "/a", &[("cpu.stat", "usage_usec 5\n")]);
    assert!(read());
}

#[test]
fn reads_in_quick_succession_keep_the_rate_of_the_last_valid_pair() {
    let root = tempfile::tempdir().expect("a directory");
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 10);
    let mut read = |usage: u64, at_ms: i64| {
        lay(root.path(), "/a", &[("cpu.stat", &format!("usage_usec {usage}\n"))]);
        let seen = reader.pass(&[at("/a", Depth::Core)], MACHINE, &|| at_ms * 1_000_000);
        seen[0].as_ref().and_then(|s| s.reading.cpu).and_then(|cpu| cpu.rate)
    };
    assert_eq!(read(0, 1000), None);
    assert_eq!(read(1_000_000, 2000), Some(1_000_000_000));
    assert_eq!(read(1_000_001, 2100), Some(1_000_000_000));
    assert_eq!(read(1_500_000, 3000), Some(500_000_000));
    assert_eq!(read(10, 3100), None, "AC-04b-M8: a counter that was set back has no rate");
}

#[test]
fn containers_of_our_own_runtime_are_found_as_scopes() {
    let root = tempfile::tempdir().expect("a directory");
    let files = [("memory.current", "100\n"), ("memory.max", "50331648\n"), ("cgroup.procs", "17\n18\n")];
    lay(root.path(), "/kubepods/podu", &files[..1]);
    lay(root.path(), "/kubepods/podu/berth-c1.scope", &files);
    let mut reader = reader(Mounts::Unified(root.path().to_owned()), 100);
    let wanted = |key| CgroupRequest { key, depth: Some(Depth::Full) };
    let all = [wanted(CgroupKey::Pod("u".into())), wanted(CgroupKey::Container("u".into(), "c1".into()))];
    let seen = reader.pass(&all, MACHINE, &|| 0);
    let found = seen[1].as_ref().expect("found");
    assert_eq!((&*found.path, found.reading.processes), ("/kubepods/podu/berth-c1.scope", Some(2)));
    assert_eq!(found.reading.memory.map(|memory| memory.limit), Some(48 << 20));
}
