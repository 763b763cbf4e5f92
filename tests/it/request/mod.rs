//! I/O of the preparer around the pure CRI requests: files, objects, and devices (spec 03a §5-6).

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    net::IpAddr,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use berth::runtime::{
    config_preparation::{ContainerRequest, Prepare, PrepareError, SandboxRequest},
    preparer::{Preparer, PreparerConfig, PreparerDeps},
    request::resources::{NodeSwap, ResourceInputs},
};
use berth_ports::{
    ContainerTuning, EventRecord, EventSink, HandlerFeatures, IdRange, ImageUser, MountedVolume, MountedVolumes,
    NoClaims, NoDevices, NodeFacts, ObjectError, ObjectSource, PodCgroup, PullSecret, ResolvedImage, ResourceError,
    ResourceManager, RuntimeState, UserNamespaces,
};
use berth_proto::cri;
use berth_types::{
    ContainerKind, Pod, PodRef, PodUid, api,
    memory_qos::{MemoryQos, MemoryReservationPolicy},
};
use serde_json::{Value, json};
use tokio::sync::watch;

#[derive(Default)]
struct Events(Mutex<Vec<EventRecord>>);

impl EventSink for Events {
    fn record(&self, event: EventRecord) {
        self.0.lock().expect("not poisoned").push(event);
    }
}

/// One ConfigMap `settings` with `A=1`; services are not synced yet.
struct Objects;

#[async_trait]
impl ObjectSource for Objects {
    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<BTreeMap<String, String>>, ObjectError> {
        match name {
            "settings" => Ok(Arc::new(BTreeMap::from([("A".to_owned(), "1".to_owned())]))),
            _ => Err(ObjectError::NotFound { kind: "configmaps", name: name.to_owned() }),
        }
    }

    async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<BTreeMap<String, Vec<u8>>>, ObjectError> {
        Err(ObjectError::NoClient { kind: "secret", namespace: namespace.to_owned(), name: name.to_owned() })
    }

    fn services(&self, _: &str) -> Option<Vec<Arc<api::Service>>> {
        None
    }

    async fn runtime_handler(&self, _: Option<&str>) -> Result<String, ObjectError> {
        Ok(String::new())
    }

    async fn pull_secrets(&self, _: &Pod) -> (Vec<PullSecret>, Vec<String>) {
        (Vec::new(), Vec::new())
    }
}

/// Allocates a device with a mount, a variable, and an annotation to each container.
struct Devices;

#[async_trait]
impl ResourceManager for Devices {
    fn cgroup_parent(&self, _: &Pod) -> String {
        String::new()
    }

    async fn exists(&self, _: &Pod) -> bool {
        true
    }

    async fn ensure(&self, _: &Arc<Pod>) -> Result<PodCgroup, ResourceError> {
        Ok(PodCgroup { parent: String::new(), created: false })
    }

    async fn remove(&self, _: &PodRef) -> Result<(), ResourceError> {
        Ok(())
    }

    async fn pods(&self) -> Vec<PodUid> {
        Vec::new()
    }

    fn tuning(&self, _: &Pod, _: ContainerKind, _: &str) -> Result<ContainerTuning, ResourceError> {
        Ok(ContainerTuning {
            cpuset_cpus: "2-3".into(),
            exclusive_cpus: true,
            envs: vec![("DEVICE".into(), "0".into())],
            mounts: vec![cri::Mount { container_path: "/device".into(), ..Default::default() }],
            annotations: vec![("device".into(), "x".into())],
            ..Default::default()
        })
    }

    fn released(&self, _: &PodUid, _: &str) {}
}

struct Ids;

#[async_trait]
impl UserNamespaces for Ids {
    async fn assign(&self, _: &PodUid) -> Result<IdRange, ResourceError> {
        Ok(IdRange { first: 131_072, length: 65_536 })
    }

    async fn release(&self, _: &PodUid) {}
}

struct Fixture {
    root: tempfile::TempDir,
    events: Arc<Events>,
    preparer: Preparer,
}

/// A node with cgroup v1 and without swap.
fn machine() -> ResourceInputs {
    ResourceInputs {
        cpu_cfs_quota: true,
        cpu_period_us: 100_000,
        memory_bytes: 8 << 30,
        hugepage_sizes: vec![],
        cgroup_v2: false,
        single_process_oom_kill: true,
        swap: NodeSwap::default(),
        memory_qos: None,
    }
}

impl Fixture {
    fn new() -> Self {
        Self::on(machine())
    }

    fn on(machine: ResourceInputs) -> Self {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("resolv.conf"), "nameserver 1.1.1.1\nsearch x\n").expect("writable");
        fs::write(root.path().join("hosts"), "127.0.0.1 node\n").expect("writable");
        let events = Arc::new(Events::default());
        let node = NodeFacts { host_ips: vec![ip("192.0.2.1")], ..Default::default() };
        let handlers = BTreeMap::from([(
            "userns".to_owned(),
            HandlerFeatures { recursive_read_only_mounts: true, user_namespaces: true },
        )]);
        let preparer = Preparer::new(
            PreparerConfig {
                root_dir: root.path().join("root"),
                pod_logs_dir: root.path().join("logs"),
                resolv_conf: Some(root.path().join("resolv.conf")),
                node_hosts_file: root.path().join("hosts"),
                cluster_dns: vec!["10.0.0.10".into()],
                cluster_domain: "c.l".into(),
                node_name: "node".into(),
                seccomp_default: true,
                stop_signals: false,
                selinux: false,
                machine_masked: vec![],
                machine,
            },
            PreparerDeps {
                objects: Arc::new(Objects),
                resources: Arc::new(Devices),
                devices: Arc::new(NoDevices),
                claims: Arc::new(NoClaims),
                user_namespaces: Arc::new(Ids),
                events: events.clone(),
                node: watch::channel(Arc::new(node)).1,
                runtime: watch::channel(Arc::new(RuntimeState { handlers, ..Default::default() })).1,
            },
        );
        Self { root, events, preparer }
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    fn mode(&self, below: &str) -> u32 {
        fs::metadata(self.path(below)).expect(below).permissions().mode() & 0o7777
    }

    async fn sandbox(&self, pod: &Arc<Pod>, handler: &str) -> Result<cri::PodSandboxConfig, PrepareError> {
        let request = SandboxRequest { pod, attempt: 0, cgroup_parent: "/kubepods/poduid-p", handler };
        self.preparer.sandbox(request).await
    }

    async fn container(&self, pod: &Arc<Pod>, handler: &str) -> Result<cri::ContainerConfig, PrepareError> {
        let volume = MountedVolume {
            host_path: Some(self.path("volume")),
            read_only: false,
            relabel: true,
            sub_path_mode: 0o770,
        };
        let volumes =
            MountedVolumes { by_name: BTreeMap::from([("v".to_owned(), volume)]), ..MountedVolumes::default() };
        let image = ResolvedImage { reference: "sha256:1".into(), user: ImageUser::Uid(7) };
        let request = ContainerRequest {
            pod,
            kind: ContainerKind::Regular,
            container: &pod.containers()[0],
            target: None,
            restart_count: 0,
            image: &image,
            volume_images: &HashMap::new(),
            pod_ips: &[ip("fd00::5"), ip("10.0.0.5")],
            volumes: &volumes,
            handler,
        };
        self.preparer.container(request).await
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn pod(container: Value) -> Arc<Pod> {
    let mut container = container;
    container["name"] = "c".into();
    berth_testkit::pods::pod("p", json!({"containers": [container]}))
}

fn mount<'a>(config: &'a cri::ContainerConfig, container_path: &str) -> &'a cri::Mount {
    config.mounts.iter().find(|m| m.container_path == container_path).expect(container_path)
}

#[tokio::test]
async fn a_sandbox_gets_its_log_directory_and_resolver() {
    let bench = Fixture::new();
    let config = bench.sandbox(&pod(json!({})), "").await.expect("a configuration");
    assert_eq!(bench.mode("logs/default_p_uid-p"), 0o755);
    assert_eq!(config.log_directory, bench.path("logs/default_p_uid-p").to_string_lossy());
    let dns = config.dns_config.expect("dns");
    assert_eq!((dns.servers, dns.searches), (vec!["1.1.1.1".to_owned()], vec!["x".to_owned()]));
    let options = config.linux.and_then(|l| l.security_context).and_then(|s| s.namespace_options).expect("options");
    assert_eq!(options.userns_options.expect("user namespace").mode(), cri::NamespaceMode::Node);
    assert!(bench.events.0.lock().expect("not poisoned").is_empty());
}

#[tokio::test]
async fn a_resolver_file_that_cannot_be_read_fails_only_pods_that_need_it() {
    let bench = Fixture::new();
    fs::write(bench.path("resolv.conf"), "nameserver\n").expect("writable");
    assert_eq!(bench.sandbox(&pod(json!({})), "").await.expect_err("malformed").0, "nameserver list is empty ");
    fs::remove_file(bench.path("resolv.conf")).expect("removable");
    assert!(bench.sandbox(&pod(json!({})), "").await.expect_err("missing").0.contains("resolv.conf: No such file"));
    let none = berth_testkit::pods::pod("p", json!({"dnsPolicy": "None", "containers": [{"name": "c"}]}));
    bench.sandbox(&none, "").await.expect("not needed");
    bench.preparer.check_resolv_conf().await;
    let events = bench.events.0.lock().expect("not poisoned");
    assert_eq!(events.iter().map(|e| e.reason.as_ref()).collect::<Vec<_>>(), ["CheckLimitsForResolvConf"]);
}

#[tokio::test]
async fn a_user_namespace_needs_a_handler_that_has_them() {
    let bench = Fixture::new();
    let own = berth_testkit::pods::pod("p", json!({"hostUsers": false, "containers": [{"name": "c"}]}));
    // AC-03a-23
    assert_eq!(
        bench.sandbox(&own, "").await.expect_err("unsupported").0,
        "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
    );
    let config = bench.sandbox(&own, "userns").await.expect("a configuration");
    let options = config.linux.and_then(|l| l.security_context).and_then(|s| s.namespace_options).expect("options");
    let mapping = cri::IdMapping { host_id: 131_072, container_id: 0, length: 65_536 };
    assert_eq!(options.userns_options.expect("user namespace").uids, [mapping]);
    let config = bench.container(&own, "userns").await.expect("a configuration");
    assert_eq!(mount(&config, "/etc/hosts").uid_mappings, [mapping]);
    assert_eq!(mount(&config, "/dev/termination-log").gid_mappings, [mapping]);
}

#[tokio::test]
async fn a_container_gets_its_files_and_mounts_in_order() {
    let bench = Fixture::new();
    let pod = pod(json!({"volumeMounts": [{"name": "v", "mountPath": "/data"}]}));
    let config = bench.container(&pod, "").await.expect("a configuration");
    let order: Vec<&str> = config.mounts.iter().map(|m| m.container_path.as_str()).collect();
    assert_eq!(order, ["/device", "/data", "/etc/hosts", "/dev/termination-log"]);
    assert_eq!(mount(&config, "/data").host_path, bench.path("volume").to_string_lossy());
    assert_eq!(bench.mode("logs/default_p_uid-p/c"), 0o755);
    assert_eq!(bench.mode("root/pods/uid-p/etc-hosts"), 0o644);
    assert_eq!(bench.mode("root/pods/uid-p/containers/c"), 0o750);
    let message = mount(&config, "/dev/termination-log").host_path.clone();
    assert_eq!(fs::metadata(&message).expect("made").permissions().mode() & 0o777, 0o666);
    let hosts = fs::read_to_string(bench.path("root/pods/uid-p/etc-hosts")).expect("written");
    assert!(hosts.ends_with("10.0.0.5\tp\nfd00::5\tp\n"), "the node's family comes first: {hosts}");
}

/// Bytes that this process has read so far.
fn bytes_read() -> u64 {
    let text = fs::read_to_string("/proc/self/io").expect("readable");
    text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok()).expect("a number")
}

#[tokio::test]
async fn the_hosts_file_is_replaced_only_when_it_differs() {
    use std::os::unix::fs::MetadataExt;
    let bench = Fixture::new();
    let inode = || fs::metadata(bench.path("root/pods/uid-p/etc-hosts")).expect("written").ino();
    let pod = pod(json!({}));
    bench.container(&pod, "").await.expect("a configuration");
    let first = inode();
    bench.container(&pod, "").await.expect("a configuration");
    assert_eq!(inode(), first);
    fs::write(bench.path("root/pods/uid-p/etc-hosts"), "changed by a container").expect("writable");
    bench.container(&pod, "").await.expect("a configuration");
    assert!(fs::read_to_string(bench.path("root/pods/uid-p/etc-hosts")).expect("written").starts_with("# Kube"));
    // A container may extend its own hosts file without limit; the comparison reads no more than was written
    let file = fs::OpenOptions::new().write(true).open(bench.path("root/pods/uid-p/etc-hosts")).expect("writable");
    file.set_len(4 << 30).expect("a hole");
    let before = bytes_read();
    bench.container(&pod, "").await.expect("a configuration");
    assert!(bytes_read() - before < 1 << 20, "{} bytes read", bytes_read() - before);
    assert!(fs::metadata(bench.path("root/pods/uid-p/etc-hosts")).expect("written").len() < 4096);
    let left = fs::read_dir(bench.path("root/pods/uid-p")).expect("listable").count();
    assert_eq!(left, 2, "no temporary file stays beside etc-hosts and containers");
}

#[tokio::test]
async fn a_pod_in_the_nodes_network_sees_the_nodes_file_and_addresses() {
    let bench = Fixture::new();
    let env = json!([{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]);
    let pod = berth_testkit::pods::pod("p", json!({"hostNetwork": true, "containers": [{"name": "c", "env": env}]}));
    let image = ResolvedImage { reference: "i".into(), user: ImageUser::Unset };
    let request = ContainerRequest {
        pod: &pod,
        kind: ContainerKind::Regular,
        container: &pod.containers()[0],
        target: None,
        restart_count: 0,
        image: &image,
        volume_images: &HashMap::new(),
        pod_ips: &[],
        volumes: &MountedVolumes::default(),
        handler: "",
    };
    let config = bench.preparer.container(request).await.expect("a configuration");
    let hosts = fs::read_to_string(bench.path("root/pods/uid-p/etc-hosts")).expect("written");
    assert_eq!(hosts, "# Kubernetes-managed hosts file (host network).\n127.0.0.1 node\n");
    let value = config.envs.iter().find(|e| e.key == "IP").map(|e| e.value.as_slice());
    assert_eq!(value, Some(b"192.0.2.1".as_slice()));
}

#[tokio::test]
async fn environment_and_devices_meet_in_the_container() {
    let bench = Fixture::new();
    let pod = pod(json!({
        "envFrom": [{"configMapRef": {"name": "settings"}}],
        "env": [{"name": "B", "value": "$(A)2"},
                {"name": "GONE", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k", "optional": true}}}],
        "args": ["$(B)"], "resources": {"limits": {"cpu": "1"}}}));
    let config = bench.container(&pod, "").await.expect("a configuration");
    let env: Vec<&str> = config.envs.iter().map(|e| e.key.as_str()).collect();
    assert_eq!((env, config.args.as_slice()), (vec!["DEVICE", "A", "B"], ["12".to_owned()].as_slice()));
    assert_eq!(config.annotations.get("device").map(String::as_str), Some("x"));
    let resources = config.linux.and_then(|l| l.resources).expect("resources");
    assert_eq!((resources.cpuset_cpus.as_str(), resources.cpu_quota), ("2-3", -1));
    assert_eq!(bench.preparer.container_resources(&pod, &pod.containers()[0]).cpu_quota, -1);
}

#[tokio::test]
async fn a_resize_resets_memory_high() {
    let qos = MemoryQos {
        policy: MemoryReservationPolicy::TieredReservation,
        throttling_factor: 0.9,
        allocatable_bytes: 8 << 30,
        page_bytes: 4096,
    };
    let below_limit = Some("1020051456");
    for (cgroup_v2, memory_qos, request, created, resized) in [
        (true, Some(qos), "512Mi", below_limit, below_limit),
        // AC-06a-30
        (true, Some(qos), "1Gi", None, Some("max")),
        (true, None, "1Gi", None, None),
        (false, Some(qos), "1Gi", None, None),
    ] {
        let bench = Fixture::on(ResourceInputs { cgroup_v2, memory_qos, ..machine() });
        let pod = pod(json!({"resources": {"requests": {"memory": request}, "limits": {"memory": "1Gi"}}}));
        let high = |resources: &cri::LinuxContainerResources| resources.unified.get("memory.high").cloned();
        let config = bench.container(&pod, "").await.expect("a configuration");
        let at_start = config.linux.and_then(|linux| linux.resources).expect("resources");
        let at_resize = bench.preparer.container_resources(&pod, &pod.containers()[0]);
        let found = (high(&at_start), high(&at_resize));
        let expected = (created.map(str::to_owned), resized.map(str::to_owned));
        assert_eq!(found, expected, "v2 {cgroup_v2}, {memory_qos:?}, {request}");
    }
}

#[tokio::test]
async fn unmet_requirements_are_reported_before_anything_is_written() {
    let bench = Fixture::new();
    for (container, expected) in [
        (
            json!({"env": [{"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
            "couldn't get secret default/s, no kubeClient defined",
        ),
        (
            json!({"volumeMounts": [{"name": "w", "mountPath": "/w"}]}),
            "cannot find volume \"w\" to mount into container \"c\"",
        ),
        (
            json!({"securityContext": {"runAsNonRoot": true, "runAsUser": 0}}),
            "container's runAsUser breaks non-root policy (pod: \"p_default(uid-p)\", container: c)",
        ),
    ] {
        assert_eq!(bench.container(&pod(container), "").await.expect_err(expected).0, expected);
    }
    assert!(!bench.path("root").exists() && !bench.path("logs").exists());
}

#[tokio::test]
async fn only_the_newest_termination_messages_stay() {
    let bench = Fixture::new();
    let pod = pod(json!({}));
    for _ in 0..12 {
        bench.container(&pod, "").await.expect("a configuration");
    }
    let kept = fs::read_dir(bench.path("root/pods/uid-p/containers/c")).expect("listable").count();
    assert_eq!(kept, 8);
}

#[tokio::test]
async fn sub_paths_are_made_and_bound() {
    let bench = Fixture::new();
    fs::create_dir(bench.path("volume")).expect("makeable");
    let at = |path: &str| pod(json!({"volumeMounts": [{"name": "v", "mountPath": "/data", "subPath": path}]}));
    std::os::unix::fs::symlink("/etc", bench.path("volume/out")).expect("makeable");
    assert_eq!(
        bench.container(&at("out/x"), "").await.expect_err("outside").0,
        "failed to create subPath directory for volumeMount \"v\" of container \"c\""
    );
    match bench.container(&at("a/b"), "").await {
        Err(e) if e.0.starts_with("failed to prepare subPath") => println!("skipped: needs root"),
        made => {
            let made = made.expect("a configuration");
            let bound = bench.path("root/pods/uid-p/volume-subpaths/v/c/0");
            assert_eq!(mount(&made, "/data").host_path, bound.to_string_lossy());
            fs::write(bound.join("marker"), "x").expect("writable");
            assert!(bench.path("volume/a/b/marker").exists());
            assert_eq!(bench.mode("volume/a/b"), 0o770);
            rustix::mount::unmount(&bound, rustix::mount::UnmountFlags::empty()).expect("undone");
        }
    }
}

#[tokio::test]
async fn the_restart_count_comes_from_the_logs_where_nothing_else_knows() {
    let bench = Fixture::new();
    let pod = pod(json!({}));
    assert_eq!(bench.preparer.restart_count(&pod, "c", None).await, 0);
    let logs = bench.path("logs/default_p_uid-p/c");
    fs::create_dir_all(logs.join("9.log")).expect("a directory does not count");
    for name in ["0.log.rotated", "2.log"] {
        fs::write(logs.join(name), "").expect("writable");
    }
    // AC-03a-13
    assert_eq!(bench.preparer.restart_count(&pod, "c", None).await, 3);
}

#[tokio::test]
async fn a_uid_never_leads_out_of_the_root_directory() {
    let bench = Fixture::new();
    let odd = berth_testkit::pods::pod_with("p", json!({"uid": "../../x"}), json!({"containers": [{"name": "c"}]}));
    assert!(bench.sandbox(&odd, "").await.expect_err("refused").0.contains("invalid file name"));
    assert!(bench.container(&odd, "").await.expect_err("refused").0.contains("invalid file name"));
}
