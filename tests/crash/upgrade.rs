//! Agent upgrade: another agent with another shim takes over running pods.
//!
//! Behavior: spec 09 §2 (D5, D6), §8 (AC-09-E9).

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use berth_proto::cri::ContainerState;
use nix::mount::{MsFlags, mount};

use crate::{
    fixture::{DaemonOptions, Fixture, Pids, container, pod},
    test_machine, tests,
};

tests! {
    pods_keep_the_shim_they_have_when_the_agent_is_upgraded
}

/// Timeout of asynchronous cleanup.
const LIMIT: Duration = Duration::from_secs(60);
const COUNTS: &str = "trap 'exit 3' TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done";

/// Creates a directory with the agent and its shim; bytes appended to the shim identify its version.
fn release(place: &Path, name: &str) -> PathBuf {
    let (folder, none) = (place.join(name), None::<&str>);
    fs::create_dir_all(&folder).expect("a folder");
    let (program, shim) = (folder.join("agent"), folder.join("berth-shim"));
    fs::write(&program, "").expect("a file");
    // Bind-mounted instead of copied, because it is large.
    let own = std::env::current_exe().expect("this program");
    mount(Some(&own), &program, none, MsFlags::MS_BIND, none).expect("mounted");
    test_machine::copy_stripped(&test_machine::shim().expect("a shim"), &shim);
    let mut file = fs::OpenOptions::new().append(true).open(&shim).expect("a shim");
    file.write_all(name.as_bytes()).expect("appended");
    program
}

/// Names of the unpacked shim programs' directories.
fn unpacked(rig: &Fixture) -> Vec<String> {
    let entries = fs::read_dir(rig.place.join("state/exe")).expect("programs").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Programs of a sandbox's shim: of all processes that were started with its directory.
fn programs(sandbox: &str) -> Vec<PathBuf> {
    let all = fs::read_dir("/proc").expect("processes").flatten().map(|entry| entry.path());
    let is_shim = |path: &PathBuf| {
        let line = fs::read(path.join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.trim_end_matches('\0').ends_with(sandbox)
    };
    all.filter(is_shim).filter_map(|path| fs::read_link(path.join("exe")).ok()).collect()
}

async fn until_alone(rig: &Fixture, wanted: &str) {
    let begun = Instant::now();
    while unpacked(rig) != [wanted] {
        assert!(begun.elapsed() < LIMIT, "{:?} instead of {wanted}", unpacked(rig));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

// AC-09-E9
async fn pods_keep_the_shim_they_have_when_the_agent_is_upgraded(rig: Fixture) {
    drop(rig);
    let mut newer = None;
    let mut rig = Fixture::with(|place| {
        newer = Some(release(place, "new"));
        DaemonOptions { program: Some(release(place, "old")), ..DaemonOptions::default() }
    })
    .await;
    let length = fs::metadata(rig.place.join("old/berth-shim")).expect("a shim").len();
    if length > 16 << 20 {
        assert!(std::env::var_os("CI").is_none(), "a shim that cannot be stripped is not unpacked");
        println!("skipped pods_keep_the_shim_they_have_when_the_agent_is_upgraded: needs strip (binutils)");
        return;
    }
    rig.take_inventory();
    let first = unpacked(&rig);
    let [first] = &first[..] else { panic!("one program: {first:?}") };
    let mut config = pod(&rig, "old", Pids::Pod);
    config.port_mappings.clear();
    let old = rig.run(&config).await.expect("runs");
    let id = rig.running(&old, &container("c", COUNTS, Pids::Pod)).await;
    let before = rig.status(&id).await;

    rig.options.program = newer;
    rig.restart().await;
    let both = unpacked(&rig);
    let second = both.iter().find(|name| *name != first).expect("another program");
    assert_eq!(both.len(), 2, "the former one is in use");
    // The pod is unaffected, and its shim serves every request.
    let after = rig.status(&id).await;
    assert_eq!((after.state(), after.started_at), (ContainerState::ContainerRunning, before.started_at));
    assert_eq!(rig.exec(&id, "echo hi").await.expect("runs"), ("hi\n".to_owned(), 0));
    let more = rig.running(&old, &container("more", COUNTS, Pids::Pod)).await;
    rig.stop_container(&more, 5).await.expect("stops");
    assert_eq!(rig.status(&more).await.exit_code, 3);
    let mut config = pod(&rig, "new", Pids::Container);
    config.port_mappings.clear();
    let new = rig.run(&config).await.expect("runs");
    rig.running(&new, &container("other", COUNTS, Pids::Container)).await;
    for (sandbox, hash) in [(&old, first), (&new, second)] {
        let found = programs(sandbox);
        assert!(found.len() == 1 && found[0].parent().is_some_and(|folder| folder.ends_with(hash)), "{found:?}");
    }
    rig.stop_container(&id, 5).await.expect("stops");
    let log = fs::read_to_string(rig.status(&id).await.log_path).expect("a log");
    let strange = log.lines().enumerate().find(|(at, line)| !line.ends_with(&format!(" F {}", at + 1)));
    assert_eq!(strange, None, "no line is lost");

    // The last pod of the old shim removes its program; the program of a running pod stays.
    rig.remove(&old).await.expect("goes");
    until_alone(&rig, second).await;
    rig.remove_all("upgrade").await;
    // Without pods, an unused program is removed at once.
    rig.options.program = Some(rig.place.join("old/agent"));
    rig.restart().await;
    assert_eq!(unpacked(&rig), [first.as_str()]);
    rig.nothing_left("upgrade").await;
    rig.no_leaks();
}
