//! `emptyDir` volumes in memory and in huge pages.

use crate::testing::may_mount;
use berth_sys::mount_table;

use super::*;

/// Types and options of the mounts at a volume.
fn mounted(bench: &Bench, volume: &str) -> Vec<(String, String)> {
    let at = bench.at("volumes/kubernetes.io~empty-dir").join(volume);
    let all = mount_table::below(&at).expect("readable");
    all.into_iter().filter(|mount| mount.target == at).map(|mount| (mount.kind, mount.options)).collect()
}

fn in_memory(limits: Value, empty: Value) -> Arc<Pod> {
    let object = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"volumes": [{"name": "v", "emptyDir": empty}],
            "containers": [{"name": "c", "resources": {"limits": limits, "requests": limits},
                "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
    });
    Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
}

#[tokio::test]
async fn memory_is_as_large_as_the_smallest_limit() {
    // AC-07-2
    if !may_mount() {
        return;
    }
    let bench = bench();
    let pod = in_memory(json!({"memory": "1Gi"}), json!({"medium": "Memory", "sizeLimit": "64Mi"}));
    for _ in 0..2 {
        let set_up = bench.manager.mount(&pod).await.expect("mounted");
        assert_eq!((set_up.by_name["v"].read_only, set_up.by_name["v"].sub_path_mode), (false, 0o1777));
        let found = mounted(&bench, "v");
        assert_eq!(found.len(), 1, "mounted once: {found:?}");
        let is_sized = |(kind, options): &(String, String)| kind == "tmpfs" && options.contains("size=65536k");
        assert!(found.iter().all(is_sized), "{found:?}");
    }
    let volume = bench.at("volumes/kubernetes.io~empty-dir/v");
    fs::write(volume.join("data"), "x").expect("writable");
    // After a reboot the marker exists, but the memory-backed content does not.
    berth_sys::mount::unmount(&volume).expect("unmounted");
    bench.manager.mount(&pod).await.expect("mounted again");
    assert!(mounted(&bench, "v").len() == 1 && !volume.join("data").exists());
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(mounted(&bench, "v").is_empty() && !volume.exists());
    // The pod was removed while no agent ran.
    bench.manager.mount(&pod).await.expect("mounted");
    fs::write(volume.join("data"), "x").expect("writable");
    bench.manager.remove_directory(&"u".into()).await.expect("removed");
    assert!(mounted(&bench, "v").is_empty() && !bench.at("").exists());
}

#[tokio::test]
async fn huge_pages_need_one_size_that_is_asked_for() {
    // AC-07-3
    let bench = bench();
    let both = json!({"hugepages-2Mi": "2Mi", "hugepages-1Gi": "1Gi"});
    let failed = bench.manager.mount(&in_memory(both, json!({"medium": "HugePages"}))).await.expect_err("two sizes");
    let text = "MountVolume.SetUp failed for volume \"v\" : medium: HugePages can't be used if container requests \
                multiple huge page sizes";
    assert!(failed.to_string().ends_with(text), "{failed}");
    if !may_mount() || !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
        return println!("skipped the part that mounts: no huge pages of 2Mi");
    }
    let pod = in_memory(json!({"hugepages-2Mi": "2Mi"}), json!({"medium": "HugePages"}));
    for _ in 0..2 {
        bench.manager.mount(&pod).await.expect("mounted");
        let found = mounted(&bench, "v");
        assert_eq!(found.len(), 1, "mounted once: {found:?}");
        let is_sized = |(kind, options): &(String, String)| kind == "hugetlbfs" && options.contains("pagesize=2M");
        assert!(found.iter().all(is_sized), "{found:?}");
    }
    bench.manager.unmount(&"u".into()).await.expect("unmounted");
    assert!(mounted(&bench, "v").is_empty());
}

#[tokio::test]
async fn what_a_pod_left_that_went_away_meanwhile_is_unmounted() {
    if !may_mount() {
        return;
    }
    let bench = bench();
    let pod = in_memory(json!({}), json!({"medium": "Memory"}));
    bench.manager.mount(&pod).await.expect("mounted");
    // Bind mounts as made for containers: of a memory-backed volume, and of foreign data.
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("data"), "precious").expect("written");
    for (index, source) in [bench.at("volumes/kubernetes.io~empty-dir/v"), outside.path().to_owned()].iter().enumerate()
    {
        let target = bench.at("volume-subpaths/v/c").join(index.to_string());
        fs::create_dir_all(&target).expect("made");
        rustix::mount::mount_bind(source, &target).expect("bound");
    }
    // Another agent starts after the pod was removed.
    let other = bench_in(tempfile::tempdir().expect("a directory"), CredentialStorage::OnDisk);
    let root = bench.at("").parent().and_then(Path::parent).expect("a root").to_owned();
    let again = PodVolumeManager { root, ..other.manager };
    // Foreign mounts stay, and so does the whole pod directory.
    let foreign = bench.at("volumes/kubernetes.io~nfs/pv");
    fs::create_dir_all(&foreign).expect("made");
    rustix::mount::mount_bind(outside.path(), &foreign).expect("bound");
    let refused = again.remove_directory(&"u".into()).await.expect_err("mounted").to_string();
    assert!(refused.contains("kubernetes.io~nfs/pv") && foreign.join("data").exists(), "{refused}");
    berth_sys::mount::unmount(&foreign).expect("unmounted");
    tokio::time::timeout(Duration::from_secs(60), async {
        while again.remove_directory(&"u".into()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("removed after the pause that follows a refusal");
    assert!(mount_table::below(&bench.at("")).expect("readable").is_empty() && !bench.at("").exists());
    assert_eq!(fs::read_to_string(outside.path().join("data")).expect("still there"), "precious");
}
