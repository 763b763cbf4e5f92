//! Random valid and invalid pods: the agent survives all of them and leaks none.
//!
//! Behavior: spec 02b, 09. `BERTH_RANDOM_PODS=n` sets their number, `BERTH_RANDOM_SEED=n` the seed; a failing test
//! prints every pod.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use rand::{
    Rng, SeedableRng,
    distr::uniform::{SampleRange, SampleUniform},
    rngs::SmallRng,
    seq::IndexedRandom,
};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::node::{Node, shell};
use berth_testkit::{
    process::{PATIENCE, manifest_of},
    real,
};

/// Number of pods in `make test`, and of concurrent pods.
const PODS: usize = 60;
const BATCH: usize = 20;
/// How long a batch may take to settle; afterwards it is removed as it is.
const REST: Duration = Duration::from_secs(5);
/// Maximum growth of the agent between the first tenth and the end, KiB.
const GROWTH: u64 = 16 << 10;

fn number(name: &str, usual: usize) -> usize {
    std::env::var(name)
        .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text:?}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_pods_harm_no_other_and_leave_nothing() {
    let test = "random_pods_harm_no_other_and_leave_nothing";
    if !real::is_embedded() {
        println!("not for containerd: {test}: it is about the embedded runtime");
        return;
    }
    let Some(node) = Node::own(test).await else { return };
    let (pods, seed) = (number("BERTH_RANDOM_PODS", PODS), number("BERTH_RANDOM_SEED", 1));
    let mut dice = Dice { chance: SmallRng::seed_from_u64(u64::try_from(seed).expect("a seed")), errs: false };
    let before = traces(&node);
    let (mut early, mut refused, mut ran) = (None, 0, 0);
    for first in (0..pods).step_by(BATCH) {
        let batch: Vec<Value> = (first..pods.min(first + BATCH)).map(|n| pod(&mut dice, n)).collect();
        for (n, pod) in batch.iter().enumerate() {
            node.home.put(&format!("{n}.json"), pod.to_string());
        }
        let shown = rest(&node).await;
        ran += shown;
        refused += batch.len() - shown.min(batch.len());
        for n in 0..batch.len() {
            node.home.remove(&format!("{n}.json"));
        }
        let gone = async || node.agent.try_pods().await.is_some_and(|pods| pods.is_empty());
        let waited = tokio::time::timeout(PATIENCE, node.agent.until("no pod is left", gone)).await;
        assert!(waited.is_ok(), "pods {first} and on do not go:\n{batch:#?}");
        if early.is_none() && first + BATCH >= pods / 10 {
            early = Some(resident(&node));
        }
    }
    node.agent.until("nothing is left", async || traces(&node) == before).await;
    let (early, late) = (early.expect("there was a batch"), resident(&node));
    println!("{pods} pods: {ran} shown, {refused} refused; {early} KiB at first, {late} KiB at the end");
    assert!(ran > 0 && refused > 0, "{ran} shown, {refused} refused");
    assert!(late < early + GROWTH, "from {early} to {late} KiB");
}

/// Waits a limited time until every reported pod has settled; returns the number of reported pods.
async fn rest(node: &Node) -> usize {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let pods = node.agent.pods().await;
        let rests = |pod: &Value| {
            let phase = pod["status"]["phase"].as_str().unwrap_or_default();
            let waits = pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"].as_str();
            phase != "Pending"
                || waits.is_some_and(|reason| reason != "ContainerCreating" && reason != "PodInitializing")
        };
        let is_at_rest = begun.elapsed() > Duration::from_millis(300) && pods.iter().all(rests);
        if is_at_rest || begun.elapsed() > REST {
            return pods.len();
        }
    }
}

/// Resident memory of the agent, KiB.
fn resident(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.agent.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a field");
    line.trim_end_matches("kB").trim().parse().expect("a number")
}

/// Possible leftovers of pods: directories, mounts below the node's directories, open files of the agent, and
/// processes.
fn traces(node: &Node) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect()
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    let runtime = node.runtime.dir();
    for at in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
        if Path::new(at).starts_with(runtime) || Path::new(at).starts_with(node.home.path()) {
            all.insert(at.to_owned());
        }
    }
    all.extend(names(&node.home.root().join("pods")));
    all.extend(names(&node.home.logs()));
    all.extend(node.runtime.all());
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", node.agent.pid())).unwrap_or_default();
    all.insert(format!("{} children", children.split_whitespace().count()));
    all
}

/// Source of randomness.
struct Dice {
    chance: SmallRng,
    /// Whether this pod may contain errors.
    errs: bool,
}

impl Dice {
    fn random_range<T: SampleUniform, R: SampleRange<T>>(&mut self, range: R) -> T {
        self.chance.random_range(range)
    }

    fn random_bool(&mut self, likely: f64) -> bool {
        self.chance.random_bool(likely)
    }

    /// Whether to insert an error here.
    fn errs(&mut self, likely: f64) -> bool {
        self.errs && self.chance.random_bool(likely)
    }
}

/// A pod; two in five may contain errors.
fn pod(dice: &mut Dice, number: usize) -> Value {
    dice.errs = dice.random_bool(0.4);
    let mut containers: Vec<Value> = (0..dice.random_range(1..=3)).map(|n| container(dice, n)).collect();
    if dice.errs(0.06) {
        containers.push(json!({"name": "c0"}));
    }
    let mut spec = json!({"containers": containers, "terminationGracePeriodSeconds": dice.random_range(0..3)});
    let mut set = |field: &str, value: Value| spec[field] = value;
    if !dice.errs(0.1) {
        set("volumes", volumes(dice));
    }
    if dice.random_bool(0.2) {
        set("initContainers", json!([shell("init", pick(dice, &["true", "true", "exit 1", "sleep 0.2"], &[]))]));
    }
    set("restartPolicy", json!(pick(dice, &["Always", "OnFailure", "Never", "Never"], &["Sometimes"])));
    for (field, likely) in [("hostNetwork", 0.1), ("hostPID", 0.1), ("hostIPC", 0.1), ("shareProcessNamespace", 0.2)] {
        if dice.random_bool(likely) {
            set(field, json!(true));
        }
    }
    if dice.random_bool(0.1) {
        set("hostUsers", json!(false));
    }
    if dice.random_bool(0.3) {
        set("securityContext", pod_context(dice));
    }
    if dice.random_bool(0.1) {
        set("hostname", json!(pick(dice, &["h", "host-1"], &["-h", "a.b", "a_b"])));
    }
    if dice.random_bool(0.1) {
        set("dnsPolicy", json!(pick(dice, &["Default", "ClusterFirst"], &["None", "Nowhere"])));
    }
    if dice.random_bool(0.1) {
        set("activeDeadlineSeconds", json!(pick(dice, &[1, 100], &[0, -1])));
    }
    if dice.errs(0.1) {
        set(pick(dice, &["containers", "volumes", "tolerations", "nodeName", "whatIsThis"], &[]), odd(dice));
    }
    let name = if dice.errs(0.1) {
        pick(dice, &["", "A", "-", "x/y", "..", "é"], &[]).to_owned()
    } else {
        format!("p{number}")
    };
    manifest_of_any(&name, spec)
}

/// A pod manifest, also for containers that are not objects.
fn manifest_of_any(name: &str, spec: Value) -> Value {
    let are_objects = |list: &str| spec[list].as_array().is_none_or(|all| all.iter().all(Value::is_object));
    if are_objects("containers") && are_objects("initContainers") {
        return manifest_of(name, spec);
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
}

#[allow(clippy::too_many_lines, reason = "a generator: one field after the other")]
fn container(dice: &mut Dice, number: usize) -> Value {
    let script = pick(
        dice,
        &[
            "true",
            "exit 3",
            "sleep 100",
            "trap 'exit 0' TERM; while :; do sleep 0.1; done",
            "trap '' TERM; while :; do sleep 0.1; done",
            "kill -9 $$",
            "(sleep 100 &) ; sleep 0.1",
            "head -c 100k /dev/zero; echo; sleep 100",
            "mkdir -p /data/a/b/c; ln -s / /data/root; sleep 100",
            "truncate -s 1T /data/big; sleep 100",
        ],
        &[],
    );
    let mut one = shell(&format!("c{number}"), script);
    let mut set = |field: &str, value: Value| one[field] = value;
    if dice.random_bool(0.1) {
        set("command", pick(dice, &[json!(["/nowhere"]), json!(["/bin"]), json!([""])], &[json!("true"), json!([1])]));
    }
    if dice.random_bool(0.1) {
        set("image", json!(pick(dice, &["UPPER", "a:b:c", "docker.io/library/none:1"], &["", " a "])));
        set("imagePullPolicy", json!(pick(dice, &["Never", "IfNotPresent"], &["Sometimes"])));
    }
    if dice.random_bool(0.5) {
        let path =
            pick(dice, &["/data", "/data", "/data/deep/er", "/etc/hosts", "/proc/self", "/data/../up"], &["", "/a:b"]);
        let mut mount = json!({"name": pick(dice, &["v0", "v1"], &["v2"]), "mountPath": path});
        if dice.random_bool(0.3) {
            mount["subPath"] = json!(pick(dice, &["sub", "a/b"], &["../out", "/abs"]));
        }
        if dice.random_bool(0.2) {
            mount["mountPropagation"] = json!(pick(dice, &["HostToContainer", "None"], &["Bidirectional", "Sideways"]));
        }
        if dice.random_bool(0.2) {
            mount["readOnly"] = json!(true);
        }
        set("volumeMounts", json!([mount]));
    }
    if dice.random_bool(0.4) {
        let odd = ["-1", "1e400", "x", ""];
        let memory = pick(dice, &["16Mi", "64Mi", "1", "0"], &odd);
        let limits = json!({"memory": memory, "cpu": pick(dice, &["50m", "1", "2000m"], &odd)});
        set("resources", json!({"limits": limits, "requests": {"cpu": pick(dice, &["0", "1m", "20m"], &odd)}}));
    }
    if dice.random_bool(0.3) {
        let handlers = [
            json!({"exec": {"command": ["true"]}}),
            json!({"exec": {"command": ["false"]}}),
            json!({"tcpSocket": {"port": 80}}),
            json!({"httpGet": {"port": 80}}),
        ];
        let none = [json!({}), json!({"tcpSocket": {"port": 70000}}), json!({"exec": {}, "httpGet": {"port": 1}})];
        let mut probe = pick(dice, &handlers, &none);
        probe["periodSeconds"] = json!(pick(dice, &[1, 2], &[-1]));
        set(pick(dice, &["livenessProbe", "readinessProbe", "startupProbe"], &[]), probe);
    }
    if dice.random_bool(0.2) {
        let commands = [json!(["true"]), json!(["false"]), json!(["sleep", "5"]), json!(["/nowhere"])];
        let hook = json!({"exec": {"command": pick(dice, &commands, &[json!([]), json!("x")])}});
        set("lifecycle", json!({pick(dice, &["postStart", "preStop"], &[]).to_owned(): hook}));
    }
    if dice.random_bool(0.4) {
        set("securityContext", context(dice));
    }
    if dice.random_bool(0.2) {
        set(
            "env",
            json!([
                {"name": pick(dice, &["A", "1"], &["", "A=B"]), "value": pick(dice, &["x", "$(A)", "$(B)"], &[])},
                {"name": "F", "valueFrom": {"fieldRef": {
                    "fieldPath": pick(dice, &["metadata.name", "status.podIP"], &["spec.nowhere"])}}},
            ]),
        );
    }
    if dice.random_bool(0.1) {
        set(
            "ports",
            json!([{"containerPort": pick(dice, &[80], &[0, 70000]), "hostPort": pick(dice, &[18_099, 0], &[-5])}]),
        );
    }
    if dice.random_bool(0.2) {
        set("terminationMessagePolicy", json!(pick(dice, &["File", "FallbackToLogsOnError"], &["None"])));
    }
    if dice.errs(0.1) {
        let field = pick(
            dice,
            &["resources", "env", "volumeMounts", "livenessProbe", "securityContext", "workingDir", "tty"],
            &[],
        );
        set(field, odd(dice));
    }
    one
}

fn volumes(dice: &mut Dice) -> Value {
    let mut one = |name: &str| {
        let source = pick(
            dice,
            &[
                json!({"emptyDir": {}}),
                json!({"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}),
                json!({"emptyDir": {"sizeLimit": "64Ki"}}),
                json!({"hostPath": {"path": "/nowhere/at/all", "type": "Directory"}}),
                json!({"hostPath": {"path": "/dev/null", "type": "CharDevice"}}),
                json!({"downwardAPI": {"items": [{"path": "a/b", "fieldRef": {"fieldPath": "metadata.uid"}}]}}),
                json!({"projected": {"sources": [{"downwardAPI": {"items": [{"path": "x", "fieldRef": {"fieldPath": "metadata.name"}}]}}]}}),
                json!({"image": {"reference": "docker.io/library/busybox:1"}}),
            ],
            &[
                json!({"emptyDir": {}, "hostPath": {"path": "/nowhere/else"}}),
                json!({"configMap": {"name": "none"}}),
                json!({}),
            ],
        );
        let mut volume = source;
        volume["name"] = json!(name);
        volume
    };
    json!([one("v0"), one("v1")])
}

fn context(dice: &mut Dice) -> Value {
    let mut context = json!({});
    let mut maybe = |field: &str, value: Value, likely: f64, dice: &mut Dice| {
        if dice.random_bool(likely) {
            context[field] = value;
        }
    };
    let user = pick(dice, &[0_i64, 1000], &[-1, 1 << 40]);
    maybe("runAsUser", json!(user), 0.4, dice);
    maybe("runAsNonRoot", json!(true), 0.2, dice);
    maybe("privileged", json!(true), 0.1, dice);
    maybe("readOnlyRootFilesystem", json!(true), 0.3, dice);
    maybe("allowPrivilegeEscalation", json!(false), 0.3, dice);
    let capability = pick(dice, &["ALL", "NET_ADMIN", "NOT_ONE"], &[""]);
    maybe("capabilities", json!({"add": [capability], "drop": ["ALL"]}), 0.3, dice);
    let profile = pick(dice, &["RuntimeDefault", "Unconfined"], &["Localhost", "Other"]);
    maybe("seccompProfile", json!({"type": profile}), 0.2, dice);
    context
}

fn pod_context(dice: &mut Dice) -> Value {
    let mut context = context(dice);
    for field in ["privileged", "readOnlyRootFilesystem", "allowPrivilegeEscalation", "capabilities"] {
        context.as_object_mut().expect("an object").remove(field);
    }
    if dice.random_bool(0.4) {
        context["fsGroup"] = json!(pick(dice, &[0_i64, 2000], &[-3]));
    }
    if dice.random_bool(0.3) {
        let name =
            pick(dice, &["kernel.shm_rmid_forced", "net.ipv4.ip_unprivileged_port_start"], &["kernel.msgmax", "vm.no"]);
        context["sysctls"] = json!([{"name": name, "value": pick(dice, &["0", "1"], &["x"])}]);
    }
    context
}

/// A value that is valid nowhere.
fn odd(dice: &mut Dice) -> Value {
    let odd = [
        json!(null),
        json!([]),
        json!({}),
        json!(-1),
        json!(1e300),
        json!("\u{0}"),
        json!([[[[]]]]),
        json!("x".repeat(10_000)),
    ];
    pick(dice, &odd, &[]).clone()
}

/// One of the good values; if errors are allowed, sometimes one of the bad.
fn pick<T: Clone>(dice: &mut Dice, good: &[T], bad: &[T]) -> T {
    let from = if !bad.is_empty() && dice.errs(0.25) { bad } else { good };
    from.choose(&mut dice.chance).expect("one at least").clone()
}
