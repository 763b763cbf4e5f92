//! Compatibility with kubeadm v1.36: drop-in command line, `kubeadm-flags.env`, and configuration file.
//!
//! The agent accepts them unchanged.

use std::collections::BTreeMap;

use super::{Files, binary, kubelet};

/// As kubeadm writes it: every field without a default of kubeadm's own is present with its zero value.
const CONFIG: &str = include_str!("kubeadm.yaml");
const DROP_IN: &str = include_str!("../../../packaging/10-kubeadm.conf");
const UNIT: &str = include_str!("../../../packaging/kubelet.service");

/// Arguments of the drop-in's last `ExecStart=`, with variables expanded as by systemd.
fn command_line(flags_env: &str) -> Vec<String> {
    let environment = DROP_IN.lines().filter_map(|line| line.strip_prefix("Environment="));
    let settings = environment.chain(flags_env.lines()).filter_map(|line| {
        // Either the whole assignment is quoted, or only the value.
        let (name, value) = line.trim_matches('"').split_once('=')?;
        Some((name, value.trim_matches('"')))
    });
    let values: BTreeMap<&str, &str> = settings.collect();
    let start = DROP_IN.lines().filter_map(|line| line.strip_prefix("ExecStart=")).next_back().expect("a command");
    let words = start.split(' ').skip(1).flat_map(|word| match word.strip_prefix('$') {
        Some(name) => values.get(name).copied().unwrap_or_default().split_whitespace().collect(),
        None => vec![word],
    });
    words.map(str::to_owned).collect()
}

#[test]
fn what_kubeadm_starts_is_started() {
    for flags in [
        "KUBELET_KUBEADM_ARGS=\"\"",
        "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint=unix:///run/containerd/containerd.sock \
         --hostname-override=n --node-ip=10.0.0.9\"",
        "KUBELET_KUBEADM_ARGS=\"--cloud-provider=external \
         --register-with-taints=node-role.kubernetes.io/control-plane:NoSchedule --node-labels=a=b\"\n\
         KUBELET_EXTRA_ARGS=--v=2 --max-pods=200",
    ] {
        let files = Files::new();
        files.write("var/config.yaml", CONFIG);
        let root = files.path().join("var").display().to_string();
        let here = |word: String| word.replace("/etc/kubernetes", &root).replace("/var/lib/kubelet", &root);
        let mut args: Vec<String> = command_line(flags).into_iter().map(here).collect();
        assert!(args.contains(&format!("--config={root}/config.yaml")), "{args:?}");
        assert!(args.contains(&format!("--bootstrap-kubeconfig={root}/bootstrap-kubelet.conf")), "{args:?}");
        // A late error: flags and file are accepted before it.
        args.extend([format!("--root-dir={root}"), "--exit-on-lock-contention".to_owned()]);
        let ran = kubelet(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let failed = ran.err.lines().find(|line| line.contains("\"command failed\"")).unwrap_or(&ran.err);
        assert!(ran.code == Some(1) && failed.contains("err=\"failed to run Kubelet: "), "{flags}\n{failed}");
        assert!(!ran.err.contains("lenient decoding"), "no field of kubeadm's is unknown: {}", ran.err);
    }
}

#[test]
fn what_kubeadm_writes_is_valid() {
    let files = Files::new();
    let ran = binary("berth", &["config", "validate", &files.write("config.yaml", CONFIG)]);
    assert!(ran.code == Some(0) && ran.out.ends_with("valid\n"), "{}{}", ran.out, ran.err);
}

#[test]
fn unit_and_drop_in_agree() {
    let program = |text: &str| {
        let starts = text.lines().filter_map(|line| line.strip_prefix("ExecStart=")).next_back();
        starts.and_then(|command| command.split(' ').next()).unwrap_or_default().to_owned()
    };
    // A link of that name takes the kubelet's command line.
    assert_eq!((program(UNIT), program(DROP_IN)), ("/usr/bin/kubelet".to_owned(), "/usr/bin/kubelet".to_owned()));
    assert!(UNIT.contains("\nKillMode=process\n"), "a stop of the agent must not reach its pods");
}
