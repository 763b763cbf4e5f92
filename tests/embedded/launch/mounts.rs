//! File systems and mounts of a container: volumes, propagation, masked paths, and image symlinks.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use berth_shim::plan::{Access, MountKind, Propagation, RootKind};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use berth_testkit::launch_fixture::{LaunchFixture, NOTHING, bind, image, is_root, new, run, shell, start, stdout_of};

fn tmpfs(path: &Path) {
    fs::create_dir_all(path).expect("makeable");
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("mountable");
}

/// Creates a private mount namespace: the test's mounts are invisible to others and end with it.
fn alone() {
    unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
    let flags = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).expect("changeable");
}

const WRITE: &str = "for d in \"$@\"; do touch $d/new 2>/dev/null && echo $d || echo not $d; done";

#[test]
fn volumes_have_the_access_mode_of_the_plan() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        alone();
        let volume = bench.volume("volume");
        tmpfs(&volume.join("below"));
        for (access, expected) in [
            (Access::ReadWrite, "/v\n/v/below\n"),
            (Access::ReadOnly, "not /v\n/v/below\n"),
            (Access::RecursivelyReadOnly, "not /v\nnot /v/below\n"),
        ] {
            let mut plan = bench.plan(&["sh", "-c", WRITE, "sh", "/v", "/v/below"]);
            plan.mounts.push(bind(&volume, "/v", access, Propagation::Private));
            assert_eq!(stdout_of(run(&plan)), expected, "{access:?}");
        }
        let out = shell(
            bench,
            |plan| {
                plan.mounts.push(bind(&volume.join("file"), "/etc/one/file", Access::ReadOnly, Propagation::Private));
                plan.mounts.push(bind(&bench.at("missing/dir"), "/m", Access::ReadWrite, Propagation::Private));
                plan.root.is_read_only = true;
            },
            "cat /etc/one/file; touch /m/made; touch /x 2>/dev/null || echo read-only; touch /dev/x && echo dev",
        );
        assert_eq!(out, "content\nread-only\ndev\n");
        assert!(bench.at("missing/dir/made").exists());
        for made in ["missing", "missing/dir"] {
            let mode = fs::metadata(bench.at(made)).expect("made").permissions().mode() & 0o7777;
            assert_eq!(mode, 0o755, "{made}");
        }
    });
}

#[test]
fn mounts_have_the_propagation_of_the_plan() {
    // AC-09a-X11
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        alone();
        let names = ["shared", "slave", "private"];
        for name in names {
            let path = bench.at(name);
            tmpfs(&path);
            mount(None::<&str>, &path, None::<&str>, MsFlags::MS_SHARED, None::<&str>).expect("shareable");
            fs::create_dir(path.join("inside")).expect("makeable");
            fs::create_dir(path.join("outside")).expect("makeable");
        }
        let script = "for d in shared slave private; do mount -t tmpfs x /$d/inside; done; echo up; cat; for d in \
                      shared slave private; do ls /$d/outside; done";
        let mut plan = bench.plan(&["sh", "-c", script]);
        plan.root.is_shared = true;
        let all = (1 << 38) - 1;
        let sets = &mut plan.process.capabilities;
        (sets.bounding, sets.effective, sets.permitted) = (all, all, all);
        for (name, propagation) in
            names.into_iter().zip([Propagation::Shared, Propagation::Slave, Propagation::Private])
        {
            plan.mounts.push(bind(&bench.at(name), &format!("/{name}"), Access::ReadWrite, propagation));
        }
        let mut container = start(&plan, &NOTHING).expect("it runs");
        assert_eq!(container.line(), "up");
        let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
        let inside = names.map(|name| table.contains(&bench.at(name).join("inside").display().to_string()));
        assert_eq!(inside, [true, false, false]);
        for name in names {
            let path = bench.at(name).join("outside");
            tmpfs(&path);
            fs::write(path.join(name), "").expect("writable");
        }
        assert_eq!(container.end().out, "shared\nslave\n");
    });
}

#[test]
fn paths_are_hidden_and_protected() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let out = shell(
            bench,
            |plan| {
                let of = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect();
                plan.masked = of(&["/etc/passwd", "/proc/sys", "/sys/kernel", "/nothing/here"]);
                plan.read_only = of(&["/tmp", "/proc/irq", "/nothing/here"]);
            },
            "cat /etc/passwd; ls /proc/sys /sys/kernel; for d in /tmp /proc/sys /etc; do touch $d/x 2>/dev/null || echo \
             not $d; done; stat -c '%t %T' /etc/passwd",
        );
        assert_eq!(out, "/proc/sys:\n\n/sys/kernel:\nnot /tmp\nnot /proc/sys\n1 3\n");
    });
}

#[test]
fn links_of_an_image_lead_nowhere_else() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let secret = bench.volume("secret");
        let etc = bench.at("layers/2/d/etc");
        symlink(&secret, etc.join("out")).expect("makeable");
        symlink("../../../../../..", etc.join("up")).expect("makeable");
        symlink("/run/later", etc.join("later")).expect("makeable");
        let volume = bench.volume("volume");
        let out = shell(
            bench,
            |plan| {
                for target in ["/etc/out/x", "/etc/up/y", "/etc/later/z"] {
                    plan.mounts.push(bind(&volume, target, Access::ReadWrite, Propagation::Private));
                }
                plan.process.cwd = "/etc/up/tmp".to_owned();
            },
            "pwd -P; ls /y /run/later/z; ls /etc/out/x",
        );
        assert_eq!(out, "/tmp\n/run/later/z:\nfile\n\n/y:\nfile\nfile\n");
        assert_eq!(fs::read_dir(&secret).expect("readable").count(), 1, "nothing is made outside");
        let failure = run(&{
            let mut plan = bench.plan(&["true"]);
            plan.process.cwd = "/proc/self/fd/5".to_owned();
            plan
        });
        assert!(failure.is_err(), "CVE-2024-21626: {failure:?}");
    });
}

#[test]
fn files_are_mounted_behind_links_of_an_image_that_lead_to_nothing_yet() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let etc = bench.at("layers/2/d/etc");
        symlink("../run/systemd/resolve/stub-resolv.conf", etc.join("resolv.conf")).expect("makeable");
        symlink("/tmp/elsewhere", etc.join("hosts")).expect("makeable");
        symlink("nowhere", etc.join("hostname")).expect("makeable");
        let file = bench.volume("volume").join("own");
        fs::write(&file, "here\n").expect("writable");
        let out = shell(
            bench,
            |plan| {
                for target in ["/etc/resolv.conf", "/etc/hosts", "/etc/hostname"] {
                    plan.mounts.push(bind(&file, target, Access::ReadWrite, Propagation::Private));
                }
            },
            "cat /etc/resolv.conf /etc/hosts /etc/hostname; ls /run/systemd/resolve /tmp/elsewhere /etc/nowhere",
        );
        assert_eq!(out, "here\nhere\nhere\n/etc/nowhere\n/tmp/elsewhere\n\n/run/systemd/resolve:\nstub-resolv.conf\n");
    });
}

#[test]
fn kernel_file_systems_are_mounted_behind_no_link_of_an_image() {
    if !is_root() {
        return;
    }
    for (name, kind) in [("proc", "proc"), ("sys", "sysfs")] {
        LaunchFixture::new().shim(|bench| {
            let at = bench.at("layers/2/d").join(name);
            let _ = fs::remove_dir(&at); // it may not exist
            symlink("/tmp/p", &at).expect("makeable");
            let failure = run(&bench.plan(&["true"])).expect_err("it leads elsewhere");
            let text = format!("filesystem \"{kind}\" must be mounted on ordinary directory: /{name}");
            assert_eq!(failure.text, text);
        });
    }
}

#[test]
fn images_are_mounted_read_only() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let part = |target: &str, sub_path: &str| {
            let mut mount = image(bench, target, &["2/d", "1/d"]);
            if let MountKind::Layers { sub_path: part, .. } = &mut mount.source {
                sub_path.clone_into(part);
            }
            mount
        };
        let out = shell(
            bench,
            |plan| {
                plan.mounts.push(image(bench, "/one", &["2/d"]));
                plan.mounts.push(image(bench, "/both", &["2/d", "1/d"]));
                plan.mounts.push(part("/part", "etc"));
                plan.root.kind = RootKind::Directory(bench.at("layers/1/d"));
            },
            "ls /one /both/etc /part; touch /one/x /both/x /part/x 2>/dev/null || echo read-only; /both/bin/echo run",
        );
        assert_eq!(out, "/both/etc:\npasswd\n\n/one:\netc\n\n/part:\npasswd\nread-only\nrun\n");
        let mut plan = bench.plan(&["true"]);
        plan.mounts.push(part("/x", "no/thing"));
        let failure = run(&plan).expect_err("no such part");
        assert!(failure.text.starts_with("ImageVolumeMountFailed: "), "{}", failure.text);
    });
}

#[test]
fn a_container_has_the_file_systems_every_program_expects() {
    if !is_root() {
        return;
    }
    LaunchFixture::new().shim(|bench| {
        let out = shell(
            bench,
            |_| {},
            "echo x > /dev/null; for l in fd ptmx stdout; do readlink /dev/$l; done; stat -c '%A %t %T' /dev/null /dev/zero; echo \
             $$; set -- /proc/[0-9]*; echo $#; touch /sys/x /sys/fs/cgroup/x 2>/dev/null || echo read-only; ls \
             /sys/fs/cgroup/pids/cgroup.procs /sys/fs/cgroup/cgroup.procs 2>/dev/null | wc -l",
        );
        assert_eq!(
            out,
            "/proc/self/fd\npts/ptmx\n/proc/self/fd/1\ncrw-rw-rw- 1 3\ncrw-rw-rw- 1 5\n1\n1\nread-only\n1\n"
        );
        let own = new("tmpfs", "/tmp", "size=64k,mode=1777", Access::ReadWrite);
        let out = shell(bench, |plan| plan.mounts.push(own), "mount | grep ' /tmp '; stat -c %a /tmp");
        assert!(out.starts_with("tmpfs on /tmp type tmpfs (rw,nosuid,nodev,noexec") && out.ends_with("1777\n"), "{out}");
    });
}
