//! Flag grammar and value syntax, with the reference's error texts.

use std::ffi::OsString;

use super::*;
use crate::defaults;

fn parsed(args: &[&str]) -> Result<(ParsedArguments, KubeletSettings), String> {
    let mut settings = KubeletSettings { config: defaults::defaults(), flags: KubeletFlags::default() };
    let args: Vec<OsString> = args.iter().map(OsString::from).collect();
    parse(&args, &mut settings).map(|parsed| (parsed, settings))
}

fn settings(args: &[&str]) -> KubeletSettings {
    parsed(args).expect("good flags").1
}

#[test]
fn the_table_is_complete_and_every_flag_accepts_its_own_default() {
    let mut names: Vec<_> = FLAGS.iter().map(|flag| flag.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FLAGS.len(), "no name twice");
    let shown = values(&KubeletSettings { config: defaults::defaults(), flags: KubeletFlags::default() });
    for (name, default) in shown {
        let default = default.trim_matches(['[', ']']);
        assert_eq!(parsed(&[&format!("--{name}={default}")]).map(drop), Ok(()), "{name}={default}");
    }
}

#[test]
fn flags_are_read_the_posix_way() {
    let (found, s) = parsed(&["--port", "1234", "--max_pods=7", "--fail-swap-on=false", "--seccomp-default", "-v3"])
        .expect("good flags");
    assert_eq!((s.config.port, s.config.max_pods, s.config.logging.verbosity), (1234, 7, 3)); // AC-01-3
    assert!(!s.config.fail_swap_on && s.flags.seccomp_default);
    assert_eq!(found.given, ["port", "max-pods", "fail-swap-on", "seccomp-default", "v"]);
    assert_eq!(settings(&["--node_labels=a=b"]).flags.node_labels["a"], "b"); // AC-01-3
    assert_eq!(settings(&["-v", "4"]).config.logging.verbosity, 4);
    assert_eq!(settings(&["-v=5"]).config.logging.verbosity, 5);
    assert!(settings(&["-hv2"]).flags.help);
    assert_eq!(parsed(&["run", "--port=1", "--", "--x"]).map(|(p, _)| p.words), Ok(vec!["run".into(), "--x".into()]));
    assert_eq!(parsed(&["--fail-swap-on", "false"]).map(|(p, _)| p.words), Ok(vec!["false".to_owned()]));
    assert_eq!(settings(&["--port=0x1f"]).config.port, 31);
}

#[test]
fn errors_have_the_reference_texts() {
    for (args, error) in [
        (&["--foo"][..], "unknown flag: --foo"),
        (&["--foo=1"], "unknown flag: --foo"),
        (&["-x"], "unknown shorthand flag: 'x' in -x"),
        (&["--port"], "flag needs an argument: --port"),
        (&["-v"], "flag needs an argument: 'v' in -v"),
        (&["---port=1"], "bad flag syntax: ---port=1"),
        (
            &["--port=abc"],
            "invalid argument \"abc\" for \"--port\" flag: strconv.ParseInt: parsing \"abc\": invalid syntax",
        ),
        (
            &["--port=99999999999"],
            "invalid argument \"99999999999\" for \"--port\" flag: strconv.ParseInt: parsing \"99999999999\": value \
             out of range",
        ),
        (&["-v", "x"], "invalid argument \"x\" for \"-v, --v\" flag: strconv.ParseUint: parsing \"x\": invalid syntax"),
        (
            &["--fail-swap-on=maybe"],
            "invalid argument \"maybe\" for \"--fail-swap-on\" flag: strconv.ParseBool: parsing \"maybe\": invalid \
             syntax",
        ),
        (
            &["--sync-frequency=5"],
            "invalid argument \"5\" for \"--sync-frequency\" flag: time: missing unit in duration \"5\"",
        ),
        (
            &["--kube-reserved=cpu"],
            "invalid argument \"cpu\" for \"--kube-reserved\" flag: malformed pair, expect string=string",
        ),
        (
            &["--eviction-hard=a=b"],
            "invalid argument \"a=b\" for \"--eviction-hard\" flag: malformed pair, expect string<string",
        ),
        (
            &["--feature-gates=A"],
            "invalid argument \"A\" for \"--feature-gates\" flag: malformed pair, expect string=bool",
        ),
        (
            &["--feature-gates=A=x"],
            "invalid argument \"A=x\" for \"--feature-gates\" flag: invalid value of A: x, err: strconv.ParseBool: \
             parsing \"x\": invalid syntax",
        ),
        (
            &["--manifest-url-header=a"],
            "invalid argument \"a\" for \"--manifest-url-header\" flag: malformed pair, expect string:string",
        ),
        (&["--address=x"], "invalid argument \"x\" for \"--address\" flag: \"x\" is not a valid IP address"),
        (&["--vmodule=a"], "invalid argument \"a\" for \"--vmodule\" flag: \"a\" does not have the pattern=N format"),
        (
            &["--version=v1.35.0"],
            "invalid argument \"v1.35.0\" for \"--version\" flag: version \"v1.35.0\" must match major/minor/patch of \
             default version \"v1.36.2\"",
        ),
    ] {
        assert_eq!(parsed(args).map(drop), Err(error.to_owned()), "{args:?}");
    }
}

#[test]
fn lists_and_maps_replace_first_and_then_add() {
    let s = settings(&["--enforce-node-allocatable=a", "--enforce-node-allocatable=b,c"]);
    assert_eq!(s.config.enforce_node_allocatable, ["a", "b", "c"]);
    let mut base = KubeletSettings { config: defaults::defaults(), flags: KubeletFlags::default() };
    base.config.kube_reserved.insert("memory".to_owned(), "1Gi".to_owned());
    let args = [OsString::from("--kube-reserved= cpu = 1 ,,"), OsString::from("--kube-reserved=pid=5")];
    parse(&args, &mut base).expect("good flags");
    assert_eq!(
        base.config.kube_reserved.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(),
        ["cpu=1", "pid=5"]
    );
    let s = settings(&["--cpu-manager-policy-options=a=1,b=2"]);
    assert_eq!(s.config.cpu_manager_policy_options["a"], "1,b=2");
    let s = settings(&["--manifest-url-header=a:b,a:c", "--manifest-url-header=d:e"]);
    assert_eq!((s.config.static_pod_url_header["a"].len(), s.config.static_pod_url_header["d"].len()), (2, 1));
    let s = settings(&["--node-labels=a=1,b", "--node-labels=a=2"]);
    assert_eq!((s.flags.node_labels["a"].as_str(), s.flags.node_labels["b"].as_str()), ("2", ""));
    assert_eq!(settings(&["--cluster-dns="]).config.cluster_dns, Vec::<String>::new());
    assert_eq!(settings(&["--address="]).config.address, "0.0.0.0");
    assert_eq!(settings(&["--address=010.0.0.1"]).config.address, "010.0.0.1");
    assert_eq!(settings(&["--eviction-hard=memory.available<1Gi"]).config.eviction_hard["memory.available"], "1Gi");
}

#[test]
fn reserved_memory_has_its_own_grammar() {
    let s = settings(&["--reserved-memory=0:memory=1Gi,hugepages-2Mi=2Mi;1:memory=512Mi"]);
    assert_eq!(s.config.reserved_memory.len(), 2);
    assert_eq!(s.config.reserved_memory[0].limits["hugepages-2Mi"].to_string(), "2Mi");
    assert!(settings(&["--reserved-memory="]).config.reserved_memory.is_empty());
    for (value, cause) in [
        ("0", "the reserved memory has incorrect format, expected numaNodeID:type=quantity[,type=quantity...], got 0"),
        ("x:memory=1", "failed to convert the NUMA node ID, expected integer, got x"),
        ("0:memory", "the reserved limit has incorrect value, expected type=quantity, got memory"),
        ("0:cpu=1", "memory type conversion error, unknown type: \"cpu\""),
        ("0:memory=x", "failed to parse the quantity: x"),
    ] {
        let error = format!("invalid argument \"{value}\" for \"--reserved-memory\" flag: {cause}");
        assert_eq!(parsed(&[&format!("--reserved-memory={value}")]).map(drop), Err(error));
    }
}

#[test]
fn taints_are_keys_values_and_effects() {
    let s = settings(&["--register-with-taints=a=b:NoSchedule,c:NoExecute,d:NoSchedule-"]);
    let shown: Vec<String> = s.config.register_with_taints.iter().map(shown_taint).collect();
    assert_eq!(shown, ["{a b NoSchedule <nil>}", "{c  NoExecute <nil>}"]);
    assert!(
        settings(&["--register-with-taints=a:NoExecute", "--register-with-taints="])
            .config
            .register_with_taints
            .is_empty()
    );
    for (value, cause) in [
        ("a", "invalid taint spec: a"),
        ("a=b=c:NoSchedule", "invalid taint spec: a=b=c:NoSchedule"),
        ("a:b:c", "invalid taint spec: a:b:c"),
        ("a=b:Now", "invalid taint effect: Now, unsupported taint effect"),
        ("a:NoExecute,a=x:NoExecute", "duplicated taints with the same key and effect: {a x NoExecute <nil>}"),
    ] {
        let error = format!("invalid argument \"{value}\" for \"--register-with-taints\" flag: {cause}");
        assert_eq!(parsed(&[&format!("--register-with-taints={value}")]).map(drop), Err(error));
    }
    assert!(
        parsed(&["--register-with-taints=a b:NoExecute"])
            .is_err_and(|e| e.contains("invalid taint spec: a b:NoExecute, name part"))
    );
}

#[test]
fn deprecated_flags_warn_once() {
    let (found, _) =
        parsed(&["--max-pods=1", "--max-pods=2", "--storage-driver-db=x", "-v=1", "--provider-id=x"]).expect("good");
    assert_eq!(
        found.deprecations,
        [
            "Flag --max-pods has been deprecated, This parameter should be set via the config file specified by the \
             Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for \
             more information.",
            "Flag --storage-driver-db has been deprecated, This is a cadvisor flag that was mistakenly registered with \
             the Kubelet. Due to legacy concerns, it will follow the standard CLI deprecation timeline before being \
             removed.",
        ]
    );
}

#[test]
fn help_names_every_flag() {
    let text = help(&KubeletSettings { config: defaults::defaults(), flags: KubeletFlags::default() });
    assert!(FLAGS.iter().all(|flag| text.contains(&format!("--{}", flag.name))));
    assert!(text.contains("-v, --v int") && text.contains("(default 110)"));
}
