//! Tests of subPath resolution on real directories, also against concurrent changes.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

#[test]
fn missing_directories_are_made_with_the_mode_whatever_the_umask() {
    let volume = tempfile::tempdir().expect("a directory");
    make_inside(volume.path(), Path::new("a/b"), 0o777).expect("makeable");
    for path in ["a", "a/b"] {
        let mode = fs::metadata(volume.path().join(path)).expect("made").permissions().mode();
        assert_eq!(mode & 0o7777, 0o777, "{path}");
    }
    make_inside(volume.path(), Path::new("a/b"), 0o700).expect("there already");
    assert_eq!(fs::metadata(volume.path().join("a")).expect("made").permissions().mode() & 0o777, 0o777);
}

#[test]
fn links_are_followed_inside_and_refused_outside() {
    let (volume, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let at = |name: &str| volume.path().join(name);
    fs::create_dir(at("real")).expect("makeable");
    symlink("real", at("inside")).expect("makeable");
    symlink(at("real"), at("absolute")).expect("makeable");
    symlink(other.path(), at("outside")).expect("makeable");
    symlink("../..", at("up")).expect("makeable");
    for good in ["inside/x", "absolute/y"] {
        make_inside(volume.path(), Path::new(good), 0o755).expect(good);
    }
    assert!(at("real/x").is_dir() && at("real/y").is_dir());
    for bad in ["outside/x", "outside", "up/etc", "up"] {
        let error = make_inside(volume.path(), Path::new(bad), 0o755).expect_err(bad);
        assert_eq!(error.raw_os_error(), Some(Errno::XDEV.raw_os_error()), "{bad}");
    }
    assert_eq!(fs::read_dir(other.path()).expect("listable").count(), 0);
}

#[test]
fn a_file_on_the_way_is_an_error() {
    let volume = tempfile::tempdir().expect("a directory");
    fs::write(volume.path().join("file"), "x").expect("writable");
    assert!(make_inside(volume.path(), Path::new("file/x"), 0o755).is_err());
    make_inside(volume.path(), Path::new("file"), 0o755).expect("a file can be a sub-path");
}

/// As the agent does for a container: creates missing directories, and bind-mounts what it opened.
fn bind(volume: &Path, path: &str, target: &Path) -> io::Result<()> {
    let opened = make_inside(volume, Path::new(path), 0o755)?;
    let holder = target.ancestors().nth(3).expect("a holder");
    bind_opened(&opened, holder, target)
}

/// A pod directory; `None`, with a message, if bind mounts are not permitted.
fn pod_of_root() -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root to bind");
        return None;
    }
    Some(tempfile::tempdir().expect("a directory"))
}

fn target(pod: &tempfile::TempDir) -> std::path::PathBuf {
    pod.path().join("volume-subpaths/v/c/0")
}

#[test]
fn binds_are_kept_replaced_and_undone() {
    let Some(pod) = pod_of_root() else { return };
    let volume = tempfile::tempdir().expect("a directory");
    let at = |name: &str| volume.path().join(name);
    let target = target(&pod);
    bind(volume.path(), "a", &target).expect("bindable");
    fs::write(at("a/marker"), "x").expect("writable");
    bind(volume.path(), "a", &target).expect("kept");
    assert!(target.join("marker").exists());
    fs::write(at("file"), "y").expect("writable");
    bind(volume.path(), "file", &target).expect("replaced");
    assert_eq!(fs::read_to_string(&target).expect("readable"), "y");
    unbind(&target).expect("undone");
    assert!(at("a/marker").exists() && at("file").exists());
    unbind(&target).expect("nothing to do");
}

#[test]
fn sockets_and_fifos_can_be_bound_too() {
    let Some(pod) = pod_of_root() else { return };
    let volume = tempfile::tempdir().expect("a directory");
    let _listening = std::os::unix::net::UnixListener::bind(volume.path().join("socket")).expect("bindable");
    nix::unistd::mkfifo(&volume.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("makeable");
    for name in ["socket", "fifo"] {
        let target = target(&pod);
        bind(volume.path(), name, &target).expect(name);
        let (bound, own) = (fs::metadata(&target).expect(name), fs::metadata(volume.path().join(name)).expect(name));
        assert_eq!(bound.permissions().mode(), own.permissions().mode(), "{name}");
        unbind(&target).expect(name);
    }
}

#[test]
fn a_bind_that_fails_leaves_no_directories() {
    let pod = tempfile::tempdir().expect("a directory");
    let holder = pod.path().join("volume-subpaths");
    // A descriptor that is not of a file system: it cannot be bind-mounted, whatever the privileges.
    let (pipe, _other) = rustix::pipe::pipe().expect("a pipe");
    bind_opened(&pipe, &holder, &holder.join("v/c/0")).expect_err("a pipe");
    assert!(!holder.exists() && pod.path().exists());
}

#[test]
fn a_link_to_the_host_is_never_bound() {
    // CVE-2017-1002101, AC-07-25: whatever the link is, and at any position of the path.
    let (volume, pod) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let at = |name: &str| volume.path().join(name);
    fs::create_dir(at("dir")).expect("makeable");
    symlink("/etc", at("absolute")).expect("makeable");
    symlink("/", at("root")).expect("makeable");
    symlink("../../../../../../../../etc", at("relative")).expect("makeable");
    symlink("absolute", at("chain")).expect("makeable");
    symlink("/proc/self/root", at("magic")).expect("makeable");
    symlink("/proc/self/fd/0", at("descriptor")).expect("makeable");
    symlink("loop", at("loop")).expect("makeable");
    symlink("/nothing/there", at("dangling")).expect("makeable");
    symlink("/etc", at("dir/below")).expect("makeable");
    for path in [
        "absolute",
        "absolute/ssh",
        "root",
        "root/etc",
        "relative",
        "chain",
        "magic",
        "magic/etc",
        "descriptor",
        "loop",
        "dangling",
        "dangling/x",
        "dir/below",
        "dir/below/x",
    ] {
        bind(volume.path(), path, &target(&pod)).expect_err(path);
        assert!(!pod.path().join("volume-subpaths").exists(), "nothing is left: {path}");
    }
    assert!(!Path::new("/nothing").exists());
}

/// Number of attempts to win a race, and the maximum time.
const TRIES: usize = 1_000;
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// Exchanges two names several times during each attempt. Without a pause between two exchanges the kernel may refuse
/// every lookup, and there would be no race.
fn racing(one: &Path, other: &Path, mut tries: impl FnMut()) {
    let over = std::sync::atomic::AtomicBool::new(false);
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, one, CWD, other, flags).expect("exchangeable");
                std::thread::sleep(std::time::Duration::from_micros(1));
            }
        });
        for _ in 0..TRIES {
            tries();
            if began.elapsed() > PATIENCE {
                println!("stopped after {PATIENCE:?}");
                break;
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_directory_swapped_for_a_link_while_it_is_bound_leads_to_itself() {
    // CVE-2021-25741, AC-07-26: a container exchanges the sub-path and a link to the host, over and over.
    let Some(pod) = pod_of_root() else { return };
    let (volume, host) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    fs::write(host.path().join("secret"), "x").expect("writable");
    fs::create_dir_all(volume.path().join("sub/dir")).expect("makeable");
    fs::write(volume.path().join("sub/dir/own"), "x").expect("writable");
    symlink(host.path(), volume.path().join("link")).expect("makeable");
    let (mut bound, mut refused) = (0, 0);
    racing(&volume.path().join("sub"), &volume.path().join("link"), || {
        let target = target(&pod);
        match bind(volume.path(), "sub", &target) {
            Ok(()) => {
                assert!(!target.join("secret").exists(), "the host is not shown");
                assert!(target.join("dir/own").exists(), "what was opened is");
                bound += 1;
            }
            Err(_) => refused += 1,
        }
        unbind(&target).expect("undone");
    });
    assert!(bound > 0, "{bound} bound, {refused} refused");
}

#[test]
fn a_directory_swapped_for_a_link_while_others_are_made_in_it_leads_nowhere() {
    // CVE-2017-1002101 as it came back in safe-mkdir: nothing is made outside.
    let (volume, host) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    fs::create_dir(volume.path().join("sub")).expect("makeable");
    symlink(host.path(), volume.path().join("link")).expect("makeable");
    let mut tries = 0;
    racing(&volume.path().join("sub"), &volume.path().join("link"), || {
        tries += 1;
        let _either_way = make_inside(volume.path(), Path::new(&format!("sub/{tries}/x")), 0o755);
    });
    assert_eq!(fs::read_dir(host.path()).expect("listable").count(), 0, "after {tries} tries");
}

#[test]
fn a_directory_of_a_container_keeps_its_mode() {
    let volume = tempfile::tempdir().expect("a directory");
    let root = open_root(volume.path()).expect("there");
    fs::create_dir(volume.path().join("theirs")).expect("makeable");
    fs::set_permissions(volume.path().join("theirs"), fs::Permissions::from_mode(0o700)).expect("a mode");
    make_one(&root, OsStr::new("theirs"), 0o777).expect("there already");
    assert_eq!(fs::metadata(volume.path().join("theirs")).expect("there").permissions().mode() & 0o7777, 0o700);
    make_one(&root, OsStr::new("ours"), 0o2775).expect("made");
    assert_eq!(fs::metadata(volume.path().join("ours")).expect("there").permissions().mode() & 0o7777, 0o2775);
}
