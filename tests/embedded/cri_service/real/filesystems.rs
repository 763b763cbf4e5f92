//! critest's cases of volumes, mount propagation, sysctls, and DNS, on this machine's kernel.
//!
//! Spec 09 §11.2 (AC-09-E1).

use std::{collections::HashMap, fs, path::Path};

use berth_proto::cri;
use nix::mount::{MsFlags, mount};

use berth_testkit::embedded::{
    fixture::in_network_namespace,
    in_process::{container, daemon, pod},
};

const ASLEEP: &str = "while :; do sleep 0.1; done";

/// Mounts a tmpfs with shared propagation on a new directory.
fn shared(path: &Path) {
    fs::create_dir_all(path).expect("made");
    let none: Option<&str> = None;
    mount(Some("volume"), path, Some("tmpfs"), MsFlags::empty(), none).expect("mounted");
    mount(none, path, none, MsFlags::MS_SHARED, none).expect("shared");
}

fn volume(host_path: &Path, propagation: cri::MountPropagation) -> cri::Mount {
    cri::Mount {
        container_path: "/volume".to_owned(),
        host_path: host_path.display().to_string(),
        propagation: propagation.into(),
        ..Default::default()
    }
}

fn with(name: &str, mount: cri::Mount) -> cri::ContainerConfig {
    cri::ContainerConfig { mounts: vec![mount], ..container(name, ASLEEP) }
}

/// A privileged pod.
fn mighty(place: &Path) -> cri::PodSandboxConfig {
    let mut config = pod(place, "mighty");
    let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("a context");
    context.privileged = true;
    config
}

fn privileged(mut config: cri::ContainerConfig) -> cri::ContainerConfig {
    let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("a context");
    context.privileged = true;
    config
}

fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
    let wanted = path.display().to_string();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(&wanted))
}

// "Container": starting container with volume, also when host path is a symlink
#[test]
fn a_volume_is_the_hosts_directory() {
    in_network_namespace("a_volume_is_the_hosts_directory", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let (folder, link) = (place.path().join("folder"), place.path().join("link"));
        fs::create_dir(&folder).expect("made");
        fs::write(folder.join("file"), "of the host\n").expect("written");
        std::os::unix::fs::symlink(&folder, &link).expect("linked");
        for (name, path) in [("folder", &folder), ("link", &link)] {
            let mount = volume(path, cri::MountPropagation::PropagationPrivate);
            let id = daemon.start(&sandbox, with(name, mount)).await;
            let script = format!("cat /volume/file; echo {name} > /volume/{name}");
            assert_eq!(daemon.exec(&id, &script).await, ("of the host\n".to_owned(), 0), "{name}");
            assert_eq!(fs::read_to_string(folder.join(name)).expect("written"), format!("{name}\n"));
            let mounts = daemon.status(&id).await.mounts;
            assert_eq!(
                (mounts.len(), mounts[0].host_path.as_str()),
                (1, &*path.display().to_string()),
                "only those asked"
            );
        }
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

// "Container Mount Propagation"; AC-09a-X11
#[test]
fn mounts_travel_where_that_is_asked_for() {
    in_network_namespace("mounts_travel_where_that_is_asked_for", async |place| {
        use cri::MountPropagation::{PropagationBidirectional, PropagationHostToContainer, PropagationPrivate};
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(mighty(place.path())).await;
        for (name, propagation, comes, goes) in [
            ("rprivate", PropagationPrivate, false, false),
            ("rslave", PropagationHostToContainer, true, false),
            ("rshared", PropagationBidirectional, true, true),
        ] {
            let source = place.path().join(name);
            shared(&source);
            for folder in ["before", "later", "inside"] {
                fs::create_dir(source.join(folder)).expect("made");
            }
            shared(&source.join("before"));
            let id = daemon.start(&sandbox, privileged(with(name, volume(&source, propagation)))).await;
            shared(&source.join("later"));
            fs::write(source.join("later/file"), "").expect("written");
            let (seen, _) = daemon.exec(&id, "ls /volume/later; grep -c ' /volume/before ' /proc/mounts").await;
            assert_eq!(seen, if comes { "file\n1\n" } else { "1\n" }, "{name}");
            let script = "/bin/busybox mount -t tmpfs x /volume/inside && echo mounted";
            assert_eq!(daemon.exec(&id, script).await.0, "mounted\n", "{name}");
            assert_eq!(is_mounted(&source.join("inside")), goes, "{name}");
        }
        daemon.remove(&sandbox).await;
        let unshared = place.path().join("unshared");
        fs::create_dir(&unshared).expect("made");
        let none: Option<&str> = None;
        mount(Some("volume"), &unshared, Some("tmpfs"), MsFlags::empty(), none).expect("mounted");
        mount(none, &unshared, none, MsFlags::MS_PRIVATE, none).expect("private");
        let sandbox = daemon.run(mighty(place.path())).await;
        for (name, propagation, text) in [
            ("no-slave", PropagationHostToContainer, "but it is not a shared or slave mount"),
            ("no-shared", PropagationBidirectional, "but it is not a shared mount"),
        ] {
            let config = privileged(with(name, volume(&unshared, propagation)));
            let refused = match daemon.calls.create(&sandbox, &config).await {
                Err(refused) => refused,
                Ok(id) => daemon.calls.start_container(&id).await.expect_err(name),
            };
            assert!(refused.message().contains(text), "{name}: {}", refused.message());
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

// "Container Mount Readonly"
#[test]
fn what_is_below_a_volume_is_read_only_where_that_is_asked_for() {
    in_network_namespace("what_is_below_a_volume_is_read_only_where_that_is_asked_for", async |place| {
        use cri::MountPropagation::{PropagationBidirectional, PropagationHostToContainer, PropagationPrivate};
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(mighty(place.path())).await;
        let source = place.path().join("source");
        shared(&source);
        shared(&source.join("below"));
        let of = |readonly, recursive_read_only, propagation| cri::Mount {
            readonly,
            recursive_read_only,
            ..volume(&source, propagation)
        };
        let script = "touch /volume/a 2>/dev/null && echo above; touch /volume/below/a 2>/dev/null && echo below; true";
        for (name, mount, expected) in [
            ("writable", of(false, false, PropagationPrivate), "above\nbelow\n"),
            ("plain", of(true, false, PropagationPrivate), "below\n"),
            ("recursive", of(true, true, PropagationPrivate), ""),
        ] {
            let id = daemon.start(&sandbox, with(name, mount)).await;
            assert_eq!(daemon.exec(&id, script).await.0, expected, "{name}");
        }
        for (name, mount, text) in [
            (
                "slave",
                of(true, true, PropagationHostToContainer),
                "recursive read-only mount needs private propagation",
            ),
            ("shared", of(true, true, PropagationBidirectional), "recursive read-only mount needs private propagation"),
            ("rw", of(false, true, PropagationPrivate), "recursive read-only mount conflicts with RW mount"),
        ] {
            let refused = daemon.calls.create(&sandbox, &privileged(with(name, mount))).await.expect_err(name);
            assert!(refused.message().contains(text), "{name}: {}", refused.message());
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

// "PodSandbox": sysctls; "Networking": DNS config, hostname
#[test]
fn a_pod_has_the_settings_and_names_it_asks_for() {
    in_network_namespace("a_pod_has_the_settings_and_names_it_asks_for", async |place| {
        let daemon = daemon(place.path()).await;
        let mut config = pod(place.path(), "a");
        config.hostname = "its-own-name".to_owned();
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        config.dns_config = Some(cri::DnsConfig {
            servers: list(&["10.10.10.10"]),
            searches: list(&["google.com"]),
            options: list(&["ndots:8"]),
        });
        let linux = config.linux.as_mut().expect("Linux");
        let own = cri::NamespaceOption { pid: cri::NamespaceMode::Container.into(), ..Default::default() };
        linux.security_context.as_mut().expect("a context").namespace_options = Some(own);
        // Safe sysctls and an unsafe one.
        let wanted = [("kernel.shm_rmid_forced", "1"), ("fs.mqueue.msg_max", "100"), ("net.ipv4.ip_forward", "1")];
        linux.sysctls =
            wanted.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<HashMap<_, _>>();
        let sandbox = daemon.run(config).await;
        let id = daemon.start(&sandbox, container("c", ASLEEP)).await;
        let script = "hostname; cat /etc/resolv.conf; cd /proc/sys; cat kernel/shm_rmid_forced fs/mqueue/msg_max net/ipv4/ip_forward";
        let expected = "its-own-name\nsearch google.com\nnameserver 10.10.10.10\noptions ndots:8\n1\n100\n1\n";
        assert_eq!(daemon.exec(&id, script).await.0, expected);
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}
