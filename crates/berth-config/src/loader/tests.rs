//! Precedence of defaults, the file, drop-ins, and flags.

use super::*;

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
/// Settings with which a node starts without an API server.
const OPEN: &str = "authentication: {webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n";

/// Loads with `body` as the main file and `drop_ins` beside it.
fn with_files(body: Option<&str>, drop_ins: &[(&str, &str)], args: &[&str]) -> LoadResult {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut all: Vec<OsString> = args.iter().map(OsString::from).collect();
    if let Some(body) = body {
        let file = dir.path().join("c.yaml");
        fs::write(&file, format!("{HEAD}{OPEN}{body}")).expect("written");
        all.push(format!("--config={}", file.display()).into());
    }
    if !drop_ins.is_empty() {
        let below = dir.path().join("d");
        fs::create_dir(&below).expect("created");
        for (name, body) in drop_ins {
            fs::write(below.join(name), format!("{HEAD}{body}")).expect("written");
        }
        all.push(format!("--config-dir={}", below.display()).into());
    }
    load(Personality::Kubelet, &all, &HostFacts::default())
}

#[track_caller]
fn run(loading: LoadResult) -> LoadedConfig {
    match loading.outcome {
        Ok(StartupAction::Run(loaded)) => *loaded,
        other => panic!("{other:?}"),
    }
}

#[test]
fn flags_win_over_drop_ins_win_over_the_file() {
    let loaded = run(with_files(
        Some("port: 1234\nmaxPods: 7\n"),
        &[("a.conf", "maxPods: 8\npodsPerCore: 2\n")],
        &["--port=4321"],
    ));
    assert_eq!(loaded.config.port, 4321, "AC-01-15");
    assert_eq!((loaded.config.max_pods, loaded.config.pods_per_core), (8, 2));
}

#[test]
fn maps_are_replaced_by_flags_but_gates_are_joined() {
    let loaded = run(with_files(Some("kubeReserved: {memory: 1Gi}\n"), &[], &["--kube-reserved=cpu=1"]));
    assert_eq!(loaded.config.kube_reserved.keys().collect::<Vec<_>>(), ["cpu"], "AC-01-17");
    let body = "featureGates: {EventedPLEG: true, EnvFiles: false}\n";
    let loaded = run(with_files(Some(body), &[], &["--feature-gates=MemoryQoS=true,EnvFiles=true"]));
    assert!(loaded.gates.enabled("EventedPLEG") && loaded.gates.enabled("MemoryQoS"), "AC-01-16");
    assert!(loaded.gates.enabled("EnvFiles") && loaded.config.feature_gates["EnvFiles"], "on a clash the flag wins");
}

#[test]
fn without_a_file_kubelet_is_open_and_berth_is_not() {
    let loaded = run(with_files(None, &[], &[]));
    let config = &loaded.config;
    assert!(config.authentication.anonymous.enabled && !config.authentication.webhook.enabled, "AC-01-23");
    assert_eq!((config.authorization.mode.as_str(), config.read_only_port), ("AlwaysAllow", 10_255), "AC-01-23");
    assert!(config.eviction_hard.is_empty(), "AC-01-23");
    let is_insecure = |notice: &Notice| matches!(notice, Notice::Insecure { .. });
    let insecure: Vec<_> = loaded.notices.iter().filter(|notice| is_insecure(notice)).collect();
    assert_eq!(insecure.len(), 3, "each insecure setting is reported");
    let kept = run(with_files(None, &[("a.conf", "maxPods: 3\n")], &[]));
    assert_eq!((kept.config.read_only_port, kept.config.max_pods), (10_255, 3), "drop-ins alone keep them");

    let alone = run(load(Personality::Berth, &[], &HostFacts::default()));
    assert!(alone.flags.is_its_own_authority() && alone.config.authorization.mode == "Webhook");
    assert!(!alone.config.authentication.anonymous.enabled && alone.notices.iter().all(|n| !is_insecure(n)));
    let asked = ["--authentication-token-webhook=false", "--authorization-mode=AlwaysAllow"].map(OsString::from);
    let asked = run(load(Personality::Berth, &asked, &HostFacts::default()));
    assert!(!asked.config.authentication.anonymous.enabled && asked.config.read_only_port == 0);
}

#[test]
fn the_file_has_its_own_defaults() {
    let loaded = run(with_files(Some(""), &[], &[]));
    assert!(!loaded.config.authentication.anonymous.enabled && loaded.config.read_only_port == 0);
    assert_eq!(loaded.config.eviction_hard, defaults::hard_eviction());
    assert_eq!(loaded.flag_values["read-only-port"], "10255", "flagz shows what flags say, not files");
}

#[test]
fn the_burst_of_the_client_may_not_be_zero() {
    let loading = with_files(Some(""), &[], &["--kube-api-burst=0", "--kubeconfig=/k"]);
    assert!(
        matches!(&loading.outcome, Err(StartupError::Run(e)) if e.starts_with("failed to initialize kubelet client: burst")),
        "AC-01-42"
    );
    assert!(matches!(with_files(None, &[], &["--help"]).outcome, Ok(StartupAction::Print(_))));
}

#[test]
fn reserved_cpus_take_the_place_of_reserved_cpu() {
    let body = "reservedSystemCPUs: \"0-1\"\nkubeReserved: {cpu: 100m, memory: 1Gi}\nsystemReserved: {cpu: 200m}\n";
    let loaded = run(with_files(Some(body), &[], &[]));
    assert_eq!(loaded.config.kube_reserved.keys().collect::<Vec<_>>(), ["memory"]);
    assert_eq!(loaded.config.system_reserved["cpu"], "2");
    assert!(loaded.notices.iter().any(|notice| matches!(notice, Notice::CpusOverwritten { .. })));
    let untouched = run(with_files(Some("kubeReserved: {cpu: 100m}\n"), &[], &[]));
    assert_eq!(untouched.config.kube_reserved["cpu"], "100m");
}

#[test]
fn a_file_that_is_valid_starts_and_one_that_is_not_does_not() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("c.yaml").display().to_string();
    let verdicts = |body: &str| {
        fs::write(&file, format!("{HEAD}{OPEN}{body}")).expect("written");
        let started = load(Personality::Kubelet, &[format!("--config={file}").into()], &HostFacts::default());
        let started = started.outcome.map(drop).map_err(|error| error.to_string());
        (check(&file, None).map(drop).map_err(|error| error.to_string()), started)
    };
    for body in [
        "evictionHard: {memory.available: 100mi}\n",
        "evictionHard: {nodefs.available: \"110%\"}\n",
        "evictionHard: {foo.available: 1Gi}\n",
        "evictionSoft: {memory.available: 1Gi}\n",
        "containerLogMaxSize: 10MB\n",
        "containerLogMaxFiles: 1\n",
        "syncFrequency: 0s\nmaxPods: -1\n",
        "kubeReserved: {memory: lots}\n",
        "qosReserved: {cpu: \"10%\"}\n",
        "reservedSystemCPUs: x\n",
        "configMapAndSecretChangeDetectionStrategy: Guess\n",
        "featureGates: {NoSuchGate: true}\n",
        "authorization: {mode: Nobody}\n",
        "port: x\n",
    ] {
        let (checked, started) = verdicts(body);
        assert_eq!(checked, started, "{body}");
        assert!(checked.is_err(), "{body}");
    }
    for body in ["", "maxPods: 5\n", "clusterDNS: [x]\n", "evictionHard: {memory.available: 100Mi}\n", "unknown: 1\n"] {
        assert_eq!(verdicts(body), (Ok(()), Ok(())), "{body}");
    }
}
