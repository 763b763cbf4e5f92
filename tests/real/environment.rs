//! Environment of real containers: volumes, variables, network, hosts file, cgroups, and namespaces.

use std::fs;

use serde_json::json;

use crate::node::{Node, UNTIL_STOPPED, links, name_of, shell, uid_of};
use berth_testkit::process::{condition, container, manifest_of};

/// An init container prepares the content that the main container serves on the bridge network.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_finds_what_its_manifest_promises() {
    let Some(node) = Node::shared("a_pod_finds_what_its_manifest_promises").await else { return };
    let host = node.home.path().join("shared");
    fs::create_dir_all(&host).expect("a folder");
    fs::write(host.join("from-host"), "hello from the host\n").expect("written");
    let script = format!(
        "cat /work/prepared /host/from-host /info/labels; echo name=$NAME ip=$IP cpu=$CPU; hostname; cat /etc/hosts; \
         echo written > /host/from-pod; echo done; {UNTIL_STOPPED}"
    );
    let mut pod = manifest_of(
        "everything",
        json!({
            "terminationGracePeriodSeconds": 5,
            "hostAliases": [{"ip": "10.1.2.3", "hostnames": ["elsewhere"]}],
            "initContainers": [{
                "name": "prepare", "command": ["sh", "-c", "echo prepared > /work/prepared"],
                "volumeMounts": [{"name": "work", "mountPath": "/work"}],
            }],
            "containers": [{
                "name": "main", "command": ["sh", "-c", script],
                "resources": {"limits": {"cpu": "250m", "memory": "32Mi"}},
                "env": [
                    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}},
                ],
                "volumeMounts": [
                    {"name": "work", "mountPath": "/work"},
                    {"name": "host", "mountPath": "/host"},
                    {"name": "info", "mountPath": "/info"},
                ],
            }],
            "volumes": [
                {"name": "work", "emptyDir": {}},
                {"name": "host", "hostPath": {"path": host, "type": "Directory"}},
                {"name": "info", "downwardAPI": {
                    "items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}],
                }},
            ],
        }),
    );
    pod["metadata"]["labels"] = json!({"app": "everything"});
    let pod = node.run(&pod).await;
    let ip = pod["status"]["podIP"].as_str().expect("an address").to_owned();
    assert!(ip.starts_with("10.") && pod["status"]["hostIP"] != ip.as_str(), "{:#}", pod["status"]);
    for kind in ["PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready", "PodScheduled"] {
        assert_eq!(condition(&pod, kind), Some("True"), "{kind}: {:#}", pod["status"]);
    }
    let prepared = &container(&pod, "prepare")["state"]["terminated"];
    assert_eq!((&prepared["exitCode"], &prepared["reason"]), (&json!(0), &json!("Completed")));

    let out = node.until_output(&pod, "main", "done\n").await;
    for text in [
        "prepared\n",
        "hello from the host\n",
        "app=\"everything\"",
        &format!("name=everything-test-node ip={ip} cpu=250\n"),
        "everything-test-node\n",
        "# Kubernetes-managed hosts file.\n",
        &format!("{ip}\teverything-test-node\n"),
        "10.1.2.3\telsewhere\n",
    ] {
        assert!(out.contains(text), "{text:?} is not in\n{out}");
    }
    assert_eq!(fs::read_to_string(host.join("from-pod")).expect("written"), "written\n");
    // The path that people and log collectors use.
    let log = node.log_file(&pod, "main", 0);
    let line = fs::read_to_string(&log).expect("a log");
    let mut fields = line.lines().next().expect("a line").splitn(4, ' ');
    assert!(fields.next().is_some_and(|time| time.starts_with("20") && time.contains('T')), "{line}");
    assert_eq!((fields.next(), fields.next()), (Some("stdout"), Some("F")));
    let link = links("everything-test-node_default_main-");
    assert_eq!(link.len(), 1, "{link:?}");
    assert_eq!(fs::read_link(&link[0]).expect("a link"), log);
    assert!(node.home.root().join("pods").join(uid_of(&pod)).join("etc-hosts").exists());
    node.remove(&pod).await;
    assert!(host.join("from-pod").exists(), "what is the host's stays");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_may_use_the_hosts_network() {
    let Some(node) = Node::shared("a_pod_may_use_the_hosts_network").await else { return };
    let names = "echo names $(hostname) $(cat /etc/hostname) $HOSTNAME";
    let script = format!("ip link; {names}; cat /etc/hosts; echo done; {UNTIL_STOPPED}");
    let spec = json!({"hostNetwork": true, "terminationGracePeriodSeconds": 5, "containers": [shell("main", &script)]});
    let pod = node.run(&manifest_of("onhost", spec)).await;
    assert_eq!(pod["status"]["podIP"], pod["status"]["hostIP"], "{:#}", pod["status"]);
    let out = node.until_output(&pod, "main", "done\n").await;
    let pid = node.pid(&pod, "main");
    let netns = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).expect("a namespace");
    assert_eq!(netns(&pid.to_string()), netns("self"));
    assert!(out.contains(" lo: "), "{out}");
    // The machine's own host name, whatever the node is called.
    let name = nix::unistd::gethostname().expect("a name").into_string().expect("text");
    assert!(out.contains(&format!("names {name} {name} {name}\n")), "{out}");
    let hosts = "# Kubernetes-managed hosts file (host network).\n";
    assert!(out.contains(hosts), "{out}");
    node.remove(&pod).await;
}

/// Containers of a pod share a PID namespace only if it requests that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_are_shared_where_wanted() {
    let Some(node) = Node::shared("processes_are_shared_where_wanted").await else { return };
    for (name, shares) in [("together", true), ("apart", false)] {
        let spec = json!({
            "shareProcessNamespace": shares,
            "terminationGracePeriodSeconds": 5,
            "containers": [shell("marker", "exec sleep 987654"), shell("main", UNTIL_STOPPED)],
        });
        let pod = node.run(&manifest_of(name, spec)).await;
        let pidns =
            |container| fs::read_link(format!("/proc/{}/ns/pid", node.pid(&pod, container))).expect("a namespace");
        assert_eq!(pidns("marker") == pidns("main"), shares, "{name}");
        let ipc =
            |container| fs::read_link(format!("/proc/{}/ns/ipc", node.pid(&pod, container))).expect("a namespace");
        assert_eq!(ipc("marker"), ipc("main"), "containers of a pod always share that");
        node.remove(&pod).await;
    }
}

/// Limits and requests are set in the kernel, below the pod's own cgroup.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_arrive_in_the_cgroup() {
    let Some(node) = Node::shared("limits_arrive_in_the_cgroup").await else { return };
    let mut main = shell("main", UNTIL_STOPPED);
    main["resources"] = json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "200m", "memory": "48Mi"}});
    let spec = json!({"terminationGracePeriodSeconds": 5, "containers": [main]});
    let pod = node.run(&manifest_of("limited", spec)).await;
    assert_eq!(pod["status"]["qosClass"], "Burstable");
    let groups = node.cgroups(&pod);
    assert!(
        !groups.is_empty() && groups.iter().all(|group| group.to_string_lossy().contains("/burstable/")),
        "{groups:?}"
    );
    let pid = node.pid(&pod, "main");
    let of_process = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("readable");
    let pod_part = format!("/kubepods/burstable/pod{}/", uid_of(&pod));
    assert!(of_process.lines().any(|line| line.contains(&pod_part)), "{of_process}");
    // Either cgroup version, the pod's and the container's cgroup.
    let rows: &[(&str, &[&str])] = &[
        ("memory.max", &["50331648"]),
        ("memory.limit_in_bytes", &["50331648"]),
        ("cpu.max", &["20000 100000"]),
        ("cpu.cfs_quota_us", &["20000"]),
        ("cpu.shares", &["102"]),
    ];
    let mut checked = 0;
    for group in &groups {
        for (file, expected) in rows {
            let Ok(of_pod) = fs::read_to_string(group.join(file)) else { continue };
            assert!(expected.contains(&of_pod.trim()), "{}/{file}: {of_pod}", group.display());
            for child in fs::read_dir(group).expect("readable").flatten().filter(|e| e.path().is_dir()) {
                let own = fs::read_to_string(child.path().join(file)).expect("the same files");
                let is_sandbox = !child.file_name().to_string_lossy().contains(&main_id(&pod));
                assert!(is_sandbox || expected.contains(&own.trim()), "{}/{file}: {own}", child.path().display());
            }
            checked += 1;
        }
    }
    assert!(checked >= 2, "neither hierarchy was checked: {groups:?}");
    assert!(name_of(&pod).starts_with("limited"));
    node.remove(&pod).await;
}

fn main_id(pod: &serde_json::Value) -> String {
    let id = container(pod, "main")["containerID"].as_str().unwrap_or_default();
    id.split_once("://").map(|(_, id)| id.to_owned()).unwrap_or_default()
}
