//! Volumes in real containers: emptyDir, subPath, images, propagation, and recursive read-only.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::node::{Node, UNTIL_STOPPED, shell, uid_of};
use berth_testkit::{
    process::{container, manifest_of},
    real,
};

/// A pod whose container mounts these volumes, runs a script, and stays.
fn pod(name: &str, volumes: Value, mounts: Value, script: &str) -> Value {
    // One stream: the lines of two pipes have no common order.
    let mut main = shell("main", &format!("exec 2>&1; {script}; echo done; {UNTIL_STOPPED}"));
    main["volumeMounts"] = mounts;
    manifest_of(name, json!({"terminationGracePeriodSeconds": 5, "volumes": volumes, "containers": [main]}))
}

/// Output of a pod's script.
async fn output(node: &Node, manifest: &Value) -> String {
    let pod = node.run(manifest).await;
    let out = node.until_output(&pod, "main", "done\n").await;
    node.remove(&pod).await;
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_limited_and_gone_with_its_pod() {
    // AC-07-2, for an emptyDir at /dev/shm as well (spec 07 §13.3)
    let Some(node) = Node::shared("memory_is_limited_and_gone_with_its_pod").await else { return };
    let volumes = json!([
        {"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}}]);
    let mounts = json!([{"name": "mem", "mountPath": "/mem"}, {"name": "shm", "mountPath": "/dev/shm"}]);
    let script = "grep -E ' (/mem|/dev/shm) ' /proc/mounts; echo data > /mem/file; echo data > /dev/shm/file";
    let pod = node.run(&pod("inmemory", volumes, mounts, script)).await;
    let out = node.until_output(&pod, "main", "done\n").await;
    for (at, size) in [("/mem", "size=65536k"), ("/dev/shm", "size=32768k")] {
        let line = out.lines().rfind(|line| line.contains(&format!(" {at} tmpfs "))).unwrap_or_default();
        assert!(line.contains(size), "{at}: {out}");
    }
    let mounted = || fs::read_to_string("/proc/self/mountinfo").expect("readable");
    assert!(mounted().contains(uid_of(&pod)), "on the host too");
    node.remove(&pod).await;
    assert!(!mounted().contains(uid_of(&pod)), "nothing stays mounted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sub_path_that_leads_out_of_its_volume_mounts_nothing() {
    // AC-07-25, CVE-2017-1002101
    let Some(node) = Node::shared("a_sub_path_that_leads_out_of_its_volume_mounts_nothing").await else { return };
    let mut prepare = shell("prepare", "ln -s /etc /v/evil && ln -s ../../../../../../../../etc /v/up");
    prepare["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    for (name, sub_path) in [("evil", "evil"), ("up", "up")] {
        let mut main = shell("main", UNTIL_STOPPED);
        main["volumeMounts"] = json!([{"name": "v", "mountPath": "/sub", "subPath": sub_path}]);
        let spec =
            json!({"volumes": [{"name": "v", "emptyDir": {}}], "initContainers": [prepare], "containers": [main]});
        node.home.put_pod(&manifest_of(name, spec));
        let full = format!("{name}-test-node");
        let waits = |pod: &Value| container(pod, "main")["state"]["waiting"]["reason"] == "CreateContainerConfigError";
        let pod = node.agent.until_pod(name, "refused", waits).await;
        let message = container(&pod, "main")["state"]["waiting"]["message"].as_str().unwrap_or_default();
        assert_eq!(message, "failed to prepare subPath for volumeMount \"v\" of container \"main\"", "{full}");
        let holder = node.home.root().join("pods").join(uid_of(&pod)).join("volume-subpaths");
        assert!(!holder.exists(), "nothing is left of the try");
        node.remove(&pod).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sub_paths_are_made_in_their_volume_and_belong_to_its_group() {
    let Some(node) = Node::shared("sub_paths_are_made_in_their_volume_and_belong_to_its_group").await else { return };
    let volumes = json!([{"name": "v", "emptyDir": {}}]);
    let mounts = json!([
        {"name": "v", "mountPath": "/whole"}, {"name": "v", "mountPath": "/part", "subPath": "a/b"},
        {"name": "v", "mountPath": "/named", "subPathExpr": "of-$(WHO)"}]);
    let script = "echo data > /part/file; cat /whole/a/b/file; echo named > /named/file; cat /whole/of-me/file; \
                  stat -c '%a %g' /whole /part; id -u";
    let mut manifest = pod("parts", volumes, mounts, script);
    manifest["spec"]["securityContext"] = json!({"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 4321});
    manifest["spec"]["containers"][0]["env"] = json!([{"name": "WHO", "value": "me"}]);
    let out = output(&node, &manifest).await;
    assert_eq!(out, "data\nnamed\n2777 4321\n2777 4321\n1000\ndone\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hosts_file_is_the_containers_own_where_it_mounts_one() {
    // AC-07-30
    let Some(node) = Node::shared("the_hosts_file_is_the_containers_own_where_it_mounts_one").await else { return };
    let own = tempfile::NamedTempFile::new().expect("a file");
    fs::write(own.path(), "192.0.2.7 mine\n").expect("writable");
    let volumes = json!([{"name": "hosts", "hostPath": {"path": own.path(), "type": "File"}}]);
    let mounts = json!([{"name": "hosts", "mountPath": "/etc/hosts", "readOnly": true}]);
    let out =
        output(&node, &pod("ownhosts", volumes, mounts, "cat /etc/hosts; echo x >> /etc/hosts || echo refused")).await;
    assert!(out.starts_with("192.0.2.7 mine\n") && out.contains("refused\n") && !out.contains("Kubernetes"), "{out}");
    assert_eq!(fs::read_to_string(own.path()).expect("readable"), "192.0.2.7 mine\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_a_volume() {
    // Spec 07 §7.9
    let Some(node) = Node::shared("an_image_is_a_volume").await else { return };
    let mut manifest = pod(
        "ofimage",
        json!(null),
        json!(null),
        "wc -c < /model/bin/busybox; touch /model/x || echo refused; ls /bins",
    );
    let image = manifest["spec"]["containers"][0]["image"].clone();
    manifest["spec"]["volumes"] = json!([{"name": "model", "image": {"reference": image, "pullPolicy": "Never"}}]);
    manifest["spec"]["containers"][0]["volumeMounts"] = json!([
        {"name": "model", "mountPath": "/model"}, {"name": "model", "mountPath": "/bins", "subPath": "bin"}]);
    if !real::is_embedded() {
        // containerd before 2.1 does not support image mounts: it returns an error, and nothing is mounted instead.
        node.home.put_pod(&manifest);
        let refused = |pod: &Value| {
            let reason = &container(pod, "main")["state"]["waiting"]["reason"];
            container(pod, "main")["ready"] == true || reason == "CreateContainerError"
        };
        let pod = node.agent.until_pod("ofimage", "mounted or refused", refused).await;
        println!("this containerd: {}", container(&pod, "main")["state"]);
        return node.remove(&pod).await;
    }
    let out = output(&node, &manifest).await;
    let size = out.lines().next().and_then(|line| line.trim().parse::<u64>().ok()).unwrap_or_default();
    assert!(size > 100_000 && out.contains("refused\n") && out.contains("busybox\n"), "{out}");

    manifest["metadata"]["name"] = "noimage".into();
    manifest["spec"]["volumes"][0]["image"]["reference"] = "registry.invalid/none:1".into();
    node.home.put_pod(&manifest);
    let waits = |pod: &Value| container(pod, "main")["state"]["waiting"]["reason"] == "ErrImageNeverPull";
    let pod = node.agent.until_pod("noimage", "refused", waits).await;
    node.remove(&pod).await;
}

/// A directory that is a shared mount until dropped.
struct SharedMount(tempfile::TempDir);

impl SharedMount {
    fn new() -> Self {
        use nix::mount::{MsFlags, mount};
        let dir = tempfile::tempdir().expect("a directory");
        let none: Option<&str> = None;
        mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), none).expect("mountable");
        mount(none, dir.path(), none, MsFlags::MS_SHARED, none).expect("can be shared");
        Self(dir)
    }

    fn mount_below(&self, name: &str) {
        let at = self.0.path().join(name);
        fs::create_dir(&at).expect("makeable");
        let (flags, none) = (nix::mount::MsFlags::empty(), None::<&str>);
        nix::mount::mount(Some("tmpfs"), &at, Some("tmpfs"), flags, none).expect("mountable");
        fs::write(at.join("file"), "below\n").expect("writable");
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SharedMount {
    fn drop(&mut self) {
        // With everything mounted below; a failed test may already have unmounted it.
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mounts_propagate_as_configured() {
    let Some(node) = Node::shared("mounts_propagate_as_configured").await else { return };
    let shared = SharedMount::new();
    shared.mount_below("before");
    let volumes = json!([{"name": "h", "hostPath": {"path": shared.path()}}]);
    let mounts = json!([
        {"name": "h", "mountPath": "/private"}, {"name": "h", "mountPath": "/slave", "mountPropagation": "HostToContainer"}]);
    let script = "while [ ! -e /slave/after/file ]; do sleep 0.1; done; ls /private/after /slave/after; \
                  cat /private/before/file";
    let pod = node.run(&pod("propagated", volumes, mounts, script)).await;
    shared.mount_below("after");
    let out = node.until_output(&pod, "main", "done\n").await;
    assert_eq!(out, "/private/after:\n\n/slave/after:\nfile\nbelow\ndone\n", "{out}");
    node.remove(&pod).await;
}

/// Independent of the propagation of the machine's root: the agent makes its own directory shared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_container_mounts_in_a_volume_is_seen_by_another() {
    // Spec 07 §1
    let Some(node) = Node::shared("what_one_container_mounts_in_a_volume_is_seen_by_another").await else { return };
    let volumes = json!([{"name": "v", "emptyDir": {}}]);
    let mounts = json!([{"name": "v", "mountPath": "/v", "mountPropagation": "HostToContainer"}]);
    let script = "until [ -e /v/inner/file ]; do sleep 0.1; done; cat /v/inner/file; touch /v/seen";
    let mut manifest = pod("travels", volumes, mounts, script);
    let mut mounter = shell(
        "mounter",
        &format!(
            "mkdir /v/inner && mount -t tmpfs none /v/inner && echo below > /v/inner/file && \
             until [ -e /v/seen ]; do sleep 0.1; done; umount /v/inner; {UNTIL_STOPPED}"
        ),
    );
    mounter["securityContext"] = json!({"privileged": true});
    mounter["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}]);
    for field in ["image", "imagePullPolicy"] {
        mounter[field] = manifest["spec"]["containers"][0][field].clone();
    }
    manifest["spec"]["containers"].as_array_mut().expect("containers").push(mounter);
    let pod = node.run(&manifest).await;
    let out = node.until_output(&pod, "main", "done\n").await;
    assert_eq!(out, "below\ndone\n");
    node.remove(&pod).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_reaches_as_deep_as_it_is_asked_to() {
    // Spec 07 §13.1 (6)
    let Some(node) = Node::shared("read_only_reaches_as_deep_as_it_is_asked_to").await else { return };
    let shared = SharedMount::new();
    shared.mount_below("deep");
    let volumes = json!([{"name": "h", "hostPath": {"path": shared.path()}}]);
    let mounts = json!([
        {"name": "h", "mountPath": "/plain", "readOnly": true},
        {"name": "h", "mountPath": "/whole", "readOnly": true, "recursiveReadOnly": "IfPossible"}]);
    let script = "for at in /plain /plain/deep /whole /whole/deep; do touch $at/x 2>/dev/null && echo $at; done; true";
    let out = output(&node, &pod("readonly", volumes, mounts, script)).await;
    // containerd supports it since 2.0: with an older one only the top mount is read-only.
    let expected = if real::is_embedded() { "/plain/deep\ndone\n" } else { "/plain/deep\n/whole/deep\ndone\n" };
    assert_eq!(out, expected);
}
