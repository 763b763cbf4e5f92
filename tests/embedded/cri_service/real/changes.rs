//! Image volumes, image mounts, container updates, and log reopening. Spec 09a §3.2, §8, §9.4.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use berth_proto::cri;

use berth_testkit::{
    embedded::{
        fixture::{group, in_network_namespace},
        in_process::{Daemon, container, daemon, pod},
    },
    image,
};

const WITH_VOLUME: &str = "docker.io/library/volume:1";

async fn import(daemon: &Daemon, place: &Path) {
    let files = [("data/kept/file", b"of the image\n".to_vec(), 0o640), ("data/bare", Vec::new(), 0o600)];
    let image = image::Image { volumes: &["/data", "/fresh"], files: &files, ..image::Image::busybox(WITH_VOLUME) };
    let archive = place.join("volume.tar");
    image::write_archive(&[image], &archive).expect("written");
    daemon.images.import(&archive, None).await.expect("imported");
}

fn volume_image() -> Option<cri::ImageSpec> {
    Some(cri::ImageSpec { image: WITH_VOLUME.to_owned(), ..Default::default() })
}

const ASLEEP: &str = "while :; do sleep 1; done";

#[test]
fn volumes_of_an_image_begin_with_its_files() {
    in_network_namespace("volumes_of_an_image_begin_with_its_files", async |place| {
        let daemon = daemon(place.path()).await;
        import(&daemon, place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let config = |name: &str| cri::ContainerConfig { image: volume_image(), ..container(name, ASLEEP) };
        let (one, two) = (daemon.start(&sandbox, config("one")).await, daemon.start(&sandbox, config("two")).await);
        let script = "cat /data/kept/file; stat -c %a /data/kept/file; grep -c ' /data ' /proc/self/mounts; \
                      ls /fresh; echo new > /data/kept/file; echo more > /fresh/x";
        assert_eq!(daemon.exec(&one, script).await, ("of the image\n640\n1\n".to_owned(), 0));
        let (out, _) = daemon.exec(&two, "cat /data/kept/file; ls /fresh").await;
        assert_eq!(out, "of the image\n", "each container has its own");
        // A mount of the request replaces the image's volume.
        let host_path = place.path().join("mounted");
        fs::create_dir(&host_path).expect("made");
        let mount = cri::Mount {
            container_path: "/data/".to_owned(),
            host_path: host_path.display().to_string(),
            ..Default::default()
        };
        let three = daemon.start(&sandbox, cri::ContainerConfig { mounts: vec![mount], ..config("three") }).await;
        assert_eq!(daemon.exec(&three, "ls /data").await, (String::new(), 0));
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

#[test]
fn an_image_is_mounted_and_reported_by_its_identity() {
    in_network_namespace("an_image_is_mounted_and_reported_by_its_identity", async |place| {
        let daemon = daemon(place.path()).await;
        import(&daemon, place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let mount = cri::Mount {
            container_path: "/image".to_owned(),
            readonly: true,
            image: volume_image(),
            image_sub_path: "data".to_owned(),
            ..Default::default()
        };
        let with =
            |name: &str, mount: cri::Mount| cri::ContainerConfig { mounts: vec![mount], ..container(name, ASLEEP) };
        let id = daemon.start(&sandbox, with("c", mount.clone())).await;
        let (out, code) = daemon.exec(&id, "cat /image/kept/file; touch /image/new 2>&1").await;
        assert!(out.starts_with("of the image\n") && out.contains("Read-only") && code != 0, "{out:?} {code}");
        let known = daemon.images.status(WITH_VOLUME).expect("asked").expect("here").id();
        let mounts = daemon.status(&id).await.mounts;
        let image = mounts[0].image.clone().expect("of an image");
        assert_eq!((mounts.len(), image.image.as_str(), image.image_ref.as_str()), (1, WITH_VOLUME, &*known));
        for (name, wrong) in [
            ("writable", cri::Mount { readonly: false, ..mount.clone() }),
            ("missing", cri::Mount { image_sub_path: "nowhere".to_owned(), ..mount.clone() }),
            ("both", cri::Mount { host_path: "/tmp".to_owned(), ..mount.clone() }),
        ] {
            let (pod_sandbox_id, config) = (sandbox.clone(), Some(with(name, wrong)));
            let request = cri::CreateContainerRequest { pod_sandbox_id, config, sandbox_config: None };
            let refused = daemon.calls.rpc.clone().create_container(request).await.expect_err(name);
            assert!(refused.message().starts_with("ImageVolumeMountFailed: "), "{name}: {}", refused.message());
        }
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

/// A limit of a container, read from either cgroup version.
fn limit(place: &Path, id: &str, old: &str, new: &str) -> String {
    let group = format!("{}/{id}", group(place));
    let (controller, file) = old.split_once('/').expect("both");
    let paths = [
        Path::new("/sys/fs/cgroup").join(controller).join(&group).join(file),
        Path::new("/sys/fs/cgroup").join(&group).join(new),
    ];
    let text = paths.iter().find_map(|path| fs::read_to_string(path).ok());
    text.unwrap_or_else(|| panic!("none of {paths:?}")).trim().to_owned()
}

#[test]
fn limits_are_changed_where_it_runs() {
    in_network_namespace("limits_are_changed_where_it_runs", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let mut config = container("c", ASLEEP);
        config.linux.as_mut().expect("there").resources = Some(cri::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 20_000,
            memory_limit_in_bytes: 64 << 20,
            memory_swap_limit_in_bytes: 64 << 20,
            ..Default::default()
        });
        let id = daemon.start(&sandbox, config).await;
        let update = async |linux: cri::LinuxContainerResources| {
            let container_id = id.clone();
            let request =
                cri::UpdateContainerResourcesRequest { container_id, linux: Some(linux), ..Default::default() };
            daemon.calls.rpc.clone().update_container_resources(request).await
        };
        let memory = || limit(place.path(), &id, "memory/memory.limit_in_bytes", "memory.max");
        let quota = || limit(place.path(), &id, "cpu/cpu.cfs_quota_us", "cpu.max");
        assert_eq!(memory(), (64 << 20).to_string());
        // Only memory is set: the limit of memory and swap follows it, up and down.
        for bytes in [128 << 20, 32 << 20] {
            update(cri::LinuxContainerResources { memory_limit_in_bytes: bytes, ..Default::default() })
                .await
                .expect("changed");
            assert_eq!(memory(), bytes.to_string());
        }
        assert!(quota().starts_with("20000"), "{}", quota());
        update(cri::LinuxContainerResources { cpu_quota: 50_000, ..Default::default() }).await.expect("changed");
        assert!(quota().starts_with("50000"), "{}", quota());
        // An update that the kernel rejects changes nothing.
        let wrong =
            cri::LinuxContainerResources { cpu_quota: 70_000, cpuset_cpus: "4000".to_owned(), ..Default::default() };
        update(wrong).await.expect_err("no such processor");
        assert!(quota().starts_with("50000"), "{}", quota());
        let resources = daemon.status(&id).await.resources.and_then(|resources| resources.linux).expect("received");
        let limits =
            (resources.memory_limit_in_bytes, resources.cpu_quota, resources.cpu_period, resources.cpuset_cpus);
        assert_eq!(limits, (32 << 20, 50_000, 100_000, String::new()));
        daemon.remove(&sandbox).await;
        place.assert_clean();
        daemon.stop.cancel();
    });
}

#[test]
fn a_renamed_log_is_written_until_it_is_opened_again() {
    in_network_namespace("a_renamed_log_is_written_until_it_is_opened_again", async |place| {
        // AC-09a-X13, X19
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let script = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.02; done";
        let id = daemon.start(&sandbox, container("c", script)).await;
        let log = std::path::PathBuf::from(daemon.status(&id).await.log_path);
        let old = log.with_extension("old");
        let lines = |path: &Path| fs::read_to_string(path).unwrap_or_default().lines().count();
        let grows = async |path: &Path| {
            let (begun, before) = (Instant::now(), lines(path));
            while lines(path) < before + 3 {
                assert!(begun.elapsed() < Duration::from_secs(10), "{} does not grow", path.display());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        grows(&log).await;
        fs::rename(&log, &old).expect("renamed");
        grows(&old).await;
        assert!(!log.exists());
        let reopen = async |id: &str| {
            let request = cri::ReopenContainerLogRequest { container_id: id.to_owned() };
            daemon.calls.rpc.clone().reopen_container_log(request).await
        };
        reopen(&id).await.expect("opened");
        grows(&log).await;
        let numbers = |path: &Path| {
            let text = fs::read_to_string(path).expect("readable");
            text.lines().filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).collect::<Vec<_>>()
        };
        let (first, second) = (numbers(&old), numbers(&log));
        assert_eq!(second[0], first.last().expect("lines") + 1, "no line is lost");
        let request = cri::StopContainerRequest { container_id: id.clone(), timeout: 0 };
        daemon.calls.rpc.clone().stop_container(request).await.expect("stops");
        fs::remove_file(&log).expect("removed");
        let refused = reopen(&id).await.expect_err("it has ended");
        assert_eq!((refused.code(), refused.message()), (tonic::Code::FailedPrecondition, "container is not running"));
        assert!(!log.exists());
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}
