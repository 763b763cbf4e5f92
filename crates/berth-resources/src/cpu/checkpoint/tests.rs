//! Tests of the CPU manager's checkpoint: the reference's checksums, formats, error texts, garbage.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::{cpu::fixtures::state, drain_advice::drain_advice};

/// Entries of two pods.
const QOS_PODS: &str = concat!(
    r#"{"088fe178-cec9-4eb9-ba3c-cf45cba46371":{"qos-demo-ctr":"1,9"},"#,
    r#""681eca58-a216-4ec4-a57b-941cad3c4e0f":{"qos-demo-ctr":"2-3,10-11"}}"#,
);

/// Content of the file that an agent writes under the policy `none`.
const NONE: &str = r#"{"policyName":"none","defaultCpuSet":"","checksum":1353318690}"#;

fn file(policy: &str, default: &str, entries: &str, checksum: u64) -> String {
    let entries = if entries.is_empty() { String::new() } else { format!(r#""entries":{entries},"#) };
    format!(r#"{{"policyName":"{policy}","defaultCpuSet":"{default}",{entries}"checksum":{checksum}}}"#)
}

fn no_containers() -> InitialContainers {
    InitialContainers::new()
}

fn decode_text(text: &str, policy: &str) -> Result<CpuState, CpuCheckpointError> {
    decode(text.as_bytes(), policy, &no_containers())
}

#[test]
fn states_are_encoded_as_the_reference_encodes_them() {
    let two = [("pod/container1", "4-6"), ("pod/container2", "1-3")];
    let qos = [
        ("681eca58-a216-4ec4-a57b-941cad3c4e0f/qos-demo-ctr", "2-3,10-11"),
        ("088fe178-cec9-4eb9-ba3c-cf45cba46371/qos-demo-ctr", "1,9"),
    ];
    let entries = r#"{"pod":{"container1":"4-6","container2":"1-3"}}"#;
    for (policy, state, text) in [
        // AC-06-4
        ("none", CpuState::default(), NONE.to_owned()),
        ("none", state("4-6", &[]), file("none", "4-6", "", 354_655_845)),
        ("none", state("1-3", &two), file("none", "1-3", entries, 3_610_638_499)),
        // AC-06-6
        ("static", state("0-31", &[]), file("static", "0-31", "", 3_540_042_759)),
        ("static", state("0-3", &[]), file("static", "0-3", "", 611_748_604)),
        ("static", state("0-7", &[]), file("static", "0-7", "", 14_413_152)),
        ("static", state("0-15", &[]), file("static", "0-15", "", 4_220_024_897)),
        ("static", state("0,4-8,12-15", &qos), file("static", "0,4-8,12-15", QOS_PODS, 2_993_692_383)),
        (
            "none",
            state("1-3", &[two[0], two[1], ("pod", "4-6")]),
            file("none", "1-3", &format!(r#"{entries},"podEntries":{{"pod":{{"cpuSet":"4-6"}}}}"#), 2_649_431_787),
        ),
    ] {
        assert_eq!(String::from_utf8(encode(policy, &state)).expect("UTF-8"), text);
        assert_eq!(decode_text(&text, policy), Ok(state), "{text}");
    }
}

#[test]
fn files_of_the_policy_none_are_read() {
    let other = |policy: &str| {
        Err(CpuCheckpointError::OtherPolicy { configured: "none".to_owned(), stored: policy.to_owned() })
    };
    let corrupted = || Err(CpuCheckpointError::Corrupted);
    for (text, expected) in [
        // AC-01-38
        (r#"{"policyName":"none","defaultCpuSet":"4-6","entries":{},"checksum":354655845}"#, Ok(state("4-6", &[]))),
        (r#"{"policyName":"none","defaultCpuSet":"4-6","checksum":354655845}"#, Ok(state("4-6", &[]))),
        // AC-06-4
        (NONE, Ok(CpuState::default())),
        // AC-06-5
        (r#"{"policyName":"none","defaultCpuSet":"","checksum":1}"#, corrupted()),
        (r#"{"policyName":"none","defaultCpuSet":"0-3","checksum":0}"#, Ok(state("0-3", &[]))),
        (r#"{"policyName":"none","defaultCpuSet":"4-7","checksum":354655845}"#, corrupted()),
        (r#"{"policyName":"none","defaultCpuSet":"","checksum":4294967297}"#, corrupted()),
        // AC-06b-16
        (r#"{"policyName":"static","defaultCpuSet":"0-1","entries":{"u":{"c":"2-3"}},"checksum":0}"#, other("static")),
        (r#"{"policyName":"static","defaultCpuSet":"0-3","checksum":611748604}"#, other("static")),
        (r#"{"policyName":"static","entries":{"u":{"c":"2-3"}},"checksum":7}"#, corrupted()),
        ("{}", other("")),
    ] {
        assert_eq!(decode_text(text, "none"), expected, "{text}");
    }
    let cut = NONE.trim_end_matches('}');
    for broken in ["", "[7]", r#"{"policyName":1}"#, r#"{"checksum":-1}"#, r#"{"entries":7}"#, cut] {
        assert!(matches!(decode_text(broken, "none"), Err(CpuCheckpointError::Json(_))), "{broken}");
    }
}

#[test]
fn files_of_other_writers_are_accepted() {
    let entries = r#"{"pod":{"container1":"4-6","container2":"1-3"}}"#;
    let two = state("1-3", &[("pod/container1", "4-6"), ("pod/container2", "1-3")]);
    // Other cases of field names, unknown fields, and white space; names of pods keep their case.
    let text = format!(
        r#" {{"CHECKSUM":3610638499,"later":[{{}}],"Entries":{entries},"policyname":"none","defaultCPUSet":"1-3"}} "#
    );
    assert_eq!(decode_text(&text, "none"), Ok(two));
    // The newest format without entries of pods differs from the current one by its checksum.
    let dump = "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0-3 \
                Entries:(map[string]map[string]string)map[] PodEntries:(state.PodCPUAssignments)map[] \
                Checksum:(checksum.Checksum)0}";
    let sum = berth_types::hash::fnv1a_32(dump.as_bytes());
    assert_eq!(decode_text(&file("static", "0-3", "", u64::from(sum)), "static"), Ok(state("0-3", &[])));
    // The checksum covers the text as written, not its shortest form.
    let dump = "(*state.CPUManagerCheckpoint){PolicyName:(string)static DefaultCPUSet:(string)0,1,2 \
                Entries:(map[string]map[string]string)map[] Checksum:(checksum.Checksum)0}";
    let sum = berth_types::hash::fnv1a_32(dump.as_bytes());
    assert_eq!(decode_text(&file("static", "0,1,2", "", u64::from(sum)), "static"), Ok(state("0-2", &[])));
}

#[test]
fn the_oldest_format_is_translated() {
    let entries = r#"{"containerID1":"4-6","containerID2":"1-3"}"#;
    let containers = InitialContainers::from([
        (ContainerId::from("containerID1"), (PodUid::from("pod1"), "a".to_owned())),
        (ContainerId::from("containerID2"), (PodUid::from("pod2"), "b".to_owned())),
    ]);
    let expected = state("1-3", &[("pod1/a", "4-6"), ("pod2/b", "1-3")]);
    for checksum in [3_680_390_589, 0] {
        let text = file("none", "1-3", entries, checksum);
        assert_eq!(decode(text.as_bytes(), "none", &containers), Ok(expected.clone()), "{checksum}");
        let error = decode_text(&text, "none").expect_err("unknown containers").to_string();
        assert!(error.contains("containerID 'containerID1' not found in initial containers list"), "{error}");
    }
    let text = file("none", "1-3", entries, 3_680_390_588);
    assert_eq!(decode(text.as_bytes(), "none", &containers), Err(CpuCheckpointError::Corrupted));
}

#[test]
fn entries_of_pods_need_a_checksum() {
    let entries = r#"{},"podEntries":{"pod":{"cpuSet":"4-6"}}"#;
    assert_eq!(decode_text(&file("none", "1-3", entries, 0), "none"), Err(CpuCheckpointError::Corrupted));
}

#[test]
fn errors_have_the_texts_of_the_reference() {
    let atoi = |text: &str| format!("strconv.Atoi: parsing \"{text}\": invalid syntax");
    for (text, expected) in [
        (file("static", "0-3", "", 1), "checkpoint is corrupted".to_owned()),
        (
            file("none", "", "", 1_353_318_690),
            "configured policy \"static\" differs from state checkpoint policy \"none\"".to_owned(),
        ),
        (file("static", "x", "", 0), format!("could not parse default cpu set \"x\": {}", atoi("x"))),
        (
            file("static", "0", r#"{"p":{"c":"1,"}}"#, 0),
            format!("could not parse cpuset \"1,\" for container \"c\" in pod \"p\": {}", atoi("")),
        ),
    ] {
        let error = decode_text(&text, "static").expect_err(&text);
        assert_eq!(error.to_string(), expected);
        // AC-06-5, AC-06b-16
        assert_eq!(
            drain_advice(&error, "CPU manager", Path::new("/var/lib/kubelet/cpu_manager_state")),
            format!(
                "could not restore state from checkpoint: {expected}, please drain this node and delete the CPU \
                 manager checkpoint file \"/var/lib/kubelet/cpu_manager_state\" before restarting Kubelet"
            )
        );
    }
    // AC-06b-16
    let error = decode_text(&file("static", "0-3", "", 611_748_604), "none").expect_err("another policy");
    assert_eq!(error.to_string(), "configured policy \"none\" differs from state checkpoint policy \"static\"");
}

fn any_cpus() -> impl Strategy<Value = CpuSet> {
    prop::collection::btree_set(0_u32..300, 0..6).prop_map(|cpus| cpus.into_iter().collect())
}

fn any_name() -> impl Strategy<Value = String> {
    "[<>&\"\\\\\u{2028}\u{0}\na-c0-2é]{0,4}"
}

fn any_state() -> impl Strategy<Value = CpuState> {
    let container = prop::collection::btree_map(any_name(), any_cpus(), 0..3);
    let assignments = prop::collection::btree_map(any_name().prop_map(PodUid::from), container, 0..3);
    let pod_entries = prop::collection::btree_map(any_name().prop_map(PodUid::from), any_cpus(), 0..3);
    (any_cpus(), assignments, pod_entries).prop_map(|(default, assignments, pod_entries)| CpuState {
        default,
        assignments,
        pod_entries,
    })
}

proptest! {
    #[test]
    fn decoding_reverses_encoding(state in any_state(), policy in any_name()) {
        prop_assert_eq!(decode(&encode(&policy, &state), &policy, &no_containers()), Ok(state));
    }

    #[test]
    fn garbage_never_panics(
        garbage in prop::collection::vec(any::<u8>(), 0..200),
        state in any_state(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut content = encode("static", &state);
        let at = at.index(content.len());
        content[at] = byte;
        for content in [&garbage[..], &content[..], &content[..at]] {
            let _ignored = decode(content, "static", &no_containers());
        }
    }
}
