//! Start-up validation of the binary: flags, configuration files, error texts, and first log lines.
//!
//! Spec 01 §1-8, §22. No root needed.

mod kubeadm;

use std::{
    fs,
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
/// Required settings of a standalone node; the missing runtime ends every start at the latest.
const STANDALONE: &str = "authentication: {webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n\
    containerRuntimeEndpoint: unix:///nonexistent/runtime.sock\nruntimeRequestTimeout: 1s\n";

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("we print text");
        Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

fn binary(name: &str, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.arg0(name).args(args).output().expect("the binary starts").into()
}

fn kubelet(args: &[&str]) -> Ran {
    // The texts must not depend on the cgroup version of the test machine.
    let mut all = vec!["--fail-cgroupv1=false"];
    all.extend(args);
    binary("/usr/bin/kubelet", &all)
}

/// Asserts that the start fails before anything is started, with one line that contains the cause.
#[track_caller]
fn refused(args: &[&str], cause: &str) {
    let ran = kubelet(args);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    let line =
        ran.err.lines().find(|line| line.contains("\"command failed\"")).unwrap_or_else(|| panic!("{}", ran.err));
    assert!(line.starts_with('E') && line.contains("] \"command failed\" err=\""), "{line}");
    assert!(line.contains(cause), "{line}\nlacks {cause}");
}

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::create_dir_all(path.parent().expect("below the directory")).expect("created");
        fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Runs a valid main file with `body`, and with a late error, so that the start ends before it touches the machine.
#[track_caller]
fn starts(body: &str, args: &[&str]) -> Ran {
    let files = Files::new();
    let file = files.write("c.yaml", &format!("{HEAD}{STANDALONE}{body}"));
    let root = format!("--root-dir={}", files.path().join("root").display());
    let config = format!("--config={file}");
    let mut all = vec![config.as_str(), root.as_str(), "--exit-on-lock-contention"];
    all.extend(args);
    kubelet(&all)
}

#[test]
fn help_and_version_end_at_once() {
    let ran = kubelet(&["--version"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "Kubernetes v1.36.2\n"), "AC-01-1");
    let ran = kubelet(&["--help"]);
    assert!(ran.code == Some(0) && ran.out.contains("--pod-manifest-path") && ran.err.is_empty());
    assert!(kubelet(&["--version=raw"]).out.contains("GitVersion:\"v1.36.2\""));
    refused(&["--version", "--nope"], "failed to parse kubelet flag: unknown flag: --nope");
}

#[test]
fn berth_has_commands_and_kubelet_has_none() {
    let ran = binary("berth", &["version"]);
    assert!(ran.code == Some(0) && ran.out.contains("kubelet v1.36.2"));
    let ran = binary("berth", &["--help"]);
    assert!(ran.code == Some(0) && ran.out.contains("config") && ran.out.contains("run"));
    assert!(binary("berth", &["run", "--help"]).out.contains("--pod-manifest-path"));
    refused(&["run"], "unknown command run"); // AC-01-2
    refused(&["--lock-file"], "failed to parse kubelet flag: flag needs an argument: --lock-file");
}

#[test]
fn a_link_called_kubelet_is_kubelet() {
    let files = Files::new();
    let link = files.path().join("kubelet");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_berth"), &link).expect("linked");
    let output = Command::new(&link).arg("--version").output().expect("the binary starts");
    assert_eq!(output.stdout, b"Kubernetes v1.36.2\n");
}

#[test]
fn flags_that_cannot_be_are_refused_with_their_texts() {
    refused(&["--foo"], "err=\"failed to parse kubelet flag: unknown flag: --foo\"");
    refused(
        &["--port=abc"],
        "failed to parse kubelet flag: invalid argument \\\"abc\\\" for \\\"--port\\\" flag: strconv.ParseInt: parsing \
         \\\"abc\\\": invalid syntax",
    );
    refused(
        &["--feature-gates=NodeSwap=false"],
        "cannot set feature gate NodeSwap to false, feature is locked to true",
    );
    // AC-01-36
    let ran = kubelet(&["--node-labels=beta.kubernetes.io/x=y"]);
    assert!(
        ran.err.contains("failed to validate kubelet flags: unknown 'kubernetes.io' or 'k8s.io' labels"),
        "{}",
        ran.err
    );
    // AC-01-35
    refused(
        &["--node-ip=1.2.3.4,5.6.7.8"],
        "failed to run Kubelet: bad --node-ip \\\"1.2.3.4,5.6.7.8\\\": must contain either a single IP or a dual-stack pair",
    );
    // AC-01-42: zero has its own meaning in a flag, and the client requires a burst.
    refused(
        &["--kube-api-burst=0", "--kubeconfig=/nonexistent"],
        "failed to initialize kubelet client: burst is required to be greater than 0 when RateLimiter is not set and QPS \
         is set to greater than 0",
    );
    refused(
        &["--exit-on-lock-contention"],
        "failed to run Kubelet: cannot exit on lock file contention: no lock file specified",
    );
}

#[test]
fn files_that_cannot_be_are_refused_with_their_texts() {
    let files = Files::new();
    let empty = files.write("empty.yaml", "");
    refused(
        &[&format!("--config={empty}")],
        &format!(
            "failed to load kubelet config file, path: {empty}, error: failed to load Kubelet config file {empty}, error \
             kubelet config file \\\"{empty}\\\" was empty"
        ),
    ); // AC-01-5
    for (body, cause) in [
        ("syncFrequency: 60\n", "error failed to decode: json: cannot unmarshal number into Go value of type string"), // AC-01-7
        ("port: x\n", "json: cannot unmarshal string into Go struct field KubeletConfiguration.port of type int32"),
        (
            "imageGCHighThresholdPercent: 80\n",
            "failed to validate kubelet configuration, error: invalid configuration: imageGCLowThresholdPercent \
             (--image-gc-low-threshold) 80 must be less than imageGCHighThresholdPercent (--image-gc-high-threshold) 80, path: ",
        ), // AC-01-18
        (
            "maxPods: -1\npodsPerCore: -1\n",
            "error: [invalid configuration: maxPods (--max-pods) -1 must not be a negative number, invalid \
             configuration: podsPerCore (--pods-per-core) -1 must not be a negative number], path: ",
        ), // AC-01-19
        ("featureGates: {NodeSwap: false}\n", "cannot set feature gate NodeSwap to false, feature is locked to true"), // AC-01-20
        (
            "featureGates: {NodeDeclaredFeatures: false}\n",
            "RestartAllContainersOnContainerExits is enabled, but depends on features that are disabled: [NodeDeclaredFeatures]",
        ), // AC-01-22
        (
            "kubeReserved: {gpu: \"1\"}\nauthentication: {webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n",
            "failed to run Kubelet: --kube-reserved value failed to parse: cannot reserve \\\"gpu\\\" resource",
        ), // AC-01-39
        ("", "failed to run Kubelet: no client provided, cannot use webhook authentication"), // AC-01-24
    ] {
        let file = files.write("c.yaml", &format!("{HEAD}{body}"));
        refused(&[&format!("--config={file}")], cause);
    }
    refused(
        &["--config=/nonexistent.yaml"],
        "failed to read kubelet config file \\\"/nonexistent.yaml\\\", error: open /nonexistent.yaml: no such file or directory",
    );
    let dropins = files.write("d/10.conf", "apiVersion: kubelet.config.k8s.io/v1beta2\nkind: KubeletConfiguration\n");
    refused(
        &[&format!("--config-dir={}", Path::new(&dropins).parent().expect("a directory").display())],
        "unknown apiVersion/kind: kubelet.config.k8s.io/v1beta2, Kind=KubeletConfiguration",
    ); // AC-01-12
    let twice = files.write("t/10.conf", &format!("{HEAD}port: 1\nport: 2\n"));
    let folder = Path::new(&twice).parent().expect("a directory").display().to_string();
    let ran = kubelet(&[&format!("--config-dir={folder}")]);
    let words = format!(
        "failed to walk through kubelet dropin directory \"{folder}\": failed to load kubelet dropin file, path: {twice}, error: "
    );
    assert!(ran.code == Some(1) && ran.err.contains(&words), "{words}\n{}", ran.err);
    assert!(ran.err.contains("line 4: key \"port\" already set in map"), "{}", ran.err);
}

#[test]
fn a_watchdog_that_cannot_be_fed_is_refused() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.arg0("kubelet").arg("--fail-cgroupv1=false").env("WATCHDOG_USEC", "1000000").env_remove("WATCHDOG_PID");
    let ran = Ran::from(command.output().expect("the binary starts"));
    assert_eq!(ran.code, Some(1));
    let cause = "failed to run Kubelet: create health checker: configure watchdog timeout too small: 1s"; // AC-01-28
    assert!(ran.err.contains(cause), "{}", ran.err);
}

#[test]
fn deprecated_flags_are_reported_on_standard_error() {
    let ran = kubelet(&["--max-pods=5", "--foo-never"]);
    assert!(!ran.err.contains("has been deprecated"), "an invalid command line reports only its error");
    let ran = kubelet(&["--max-pods=5", "--exit-on-lock-contention"]);
    assert_eq!(ran.err.matches("Flag --max-pods has been deprecated, This parameter").count(), 1, "{}", ran.err);
}

#[test]
fn strict_errors_start_and_warn() {
    let ran = starts("foo: 1\n", &[]);
    // AC-01-6: a warning only; another error ends this start.
    assert!(ran.err.contains("\"Using lenient decoding as strict decoding failed\" err=\"strict decoding error: unknown field \\\"foo\\\"\""), "{}", ran.err);
    assert!(ran.err.contains("cannot exit on lock file contention"), "{}", ran.err);
    // AC-01-21: a feature gate that a release removed fails the start, wherever it is set.
    for (body, args) in [("featureGates: {Bogus: true}\n", &[][..]), ("", &["--feature-gates=Bogus=true"][..])] {
        let ran = starts(body, args);
        assert!(ran.code == Some(1) && ran.err.contains("unrecognized feature gate: Bogus"), "{args:?} {}", ran.err);
    }
    let ran = starts("port: 1\nport: 2\nlogging: {foo: 1}\n", &[]);
    for words in
        ["key \"port\" already set in map, unknown field \"logging.foo\"", "cannot exit on lock file contention"]
    {
        assert!(ran.err.replace("\\\"", "\"").contains(words), "{words}\n{}", ran.err);
    }
    let ran = starts("foo: 1\n", &["--strict-config"]);
    assert!(ran.err.contains("command failed") && !ran.err.contains("lock file contention"), "{}", ran.err);
}

#[test]
fn the_log_of_a_start_is_json_if_asked_for() {
    let files = Files::new();
    let file = files.write("c.yaml", &format!("{HEAD}{STANDALONE}"));
    let root = format!("--root-dir={}", files.path().join("root").display());
    let args = [&format!("--config={file}"), root.as_str(), "-v=1", "--logging-format=json", "--fail-cgroupv1=false"];
    // A kubelet that starts runs until it is stopped: it gets a cause of failure, and a timeout.
    let output =
        Command::new("timeout").args(["-s", "TERM", "20", env!("CARGO_BIN_EXE_berth"), "run"]).args(args).output();
    let ran = Ran::from(output.expect("the binary starts"));
    assert!(ran.err.contains("\"msg\":\"Kubelet version\"") && ran.err.contains("FLAG: --"), "{}", ran.err);
    for line in ran.err.lines() {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("AC-01-41: {e}: {line}"));
        assert!(
            object["ts"].is_number() && object["caller"].is_string() && object["msg"].is_string(),
            "AC-01-41: {line}"
        );
    }
}

#[test]
fn the_config_command_shows_and_judges() {
    let ran = binary("berth", &["config", "defaults", "--output=json"]);
    let defaults: Value = serde_json::from_str(&ran.out).expect("JSON");
    assert_eq!((&defaults["port"], &defaults["syncFrequency"]), (&10_250.into(), &"1m0s".into()));
    let yaml = binary("berth", &["config", "defaults"]).out;
    let files = Files::new();
    let file = files.write("c.yaml", &yaml);
    let ran = binary("berth", &["config", "validate", "--strict", &file]);
    assert_eq!(ran.code, Some(0), "what we print is what we read: {}", ran.err);
    let file = files.write("bad.yaml", &format!("{HEAD}maxPodz: 1\nmaxPods: -2\n"));
    let ran = binary("berth", &["config", "validate", &file]);
    assert!(
        ran.code == Some(1) && ran.err.contains("maxPods (--max-pods) -2 must not be a negative number"),
        "{}",
        ran.err
    );
    let file = files.write("typo.yaml", &format!("{HEAD}maxPodz: 1\n"));
    let ran = binary("berth", &["config", "validate", &file]);
    assert!(ran.code == Some(0) && ran.err.contains("did you mean maxPods?"), "{}", ran.err);
    assert_eq!(binary("berth", &["config", "validate", "--strict", &file]).code, Some(1));
}
