//! Table tests of the security context. Pure.

use serde_json::{Value, json};

use super::*;
use cri::{NamespaceMode as Mode, security_profile::ProfileType};

fn pod_of(spec: Value, annotations: Value) -> Pod {
    let object =
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations}, "spec": spec});
    Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
}

fn pod(shared: Value, own: Value) -> Pod {
    pod_of(json!({"securityContext": shared, "containers": [{"name": "c", "securityContext": own}]}), json!({}))
}

fn made(pod: &Pod, image: ImageAccount<'_>) -> Result<cri::LinuxContainerSecurityContext, String> {
    let inputs = SecurityInputs {
        image,
        seccomp_root: Path::new("/r/seccomp"),
        seccomp_default: false,
        volume_groups: &[77],
        machine_masked: &["/sys/x".to_owned()],
        namespaces: cri::NamespaceOption::default(),
    };
    of_container(pod, &pod.containers()[0], inputs).map_err(|e| e.to_string())
}

fn fine(shared: Value, own: Value) -> cri::LinuxContainerSecurityContext {
    made(&pod(shared, own), ImageAccount::Uid(0)).expect("a context")
}

#[test]
fn non_root_is_checked_against_fields_and_image() {
    let name = ImageAccount::Name("app");
    for (shared, own, image, expected) in [
        (json!({}), json!({}), ImageAccount::Uid(0), None),
        (json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), ImageAccount::Uid(0), None),
        (json!({"runAsNonRoot": true, "runAsUser": 5}), json!({}), name, None),
        (json!({"runAsNonRoot": true}), json!({}), ImageAccount::Uid(i64::from(i32::MAX)), None),
        (
            json!({"runAsNonRoot": true, "runAsUser": 5}),
            json!({"runAsUser": 0}),
            ImageAccount::Uid(5),
            Some("container's runAsUser breaks non-root policy (pod: \"p_n(u)\", container: c)"),
        ),
        // AC-03a-24
        (
            json!({"runAsNonRoot": true}),
            json!({}),
            name,
            Some(
                "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root \
                 (pod: \"p_n(u)\", container: c)",
            ),
        ),
        (
            json!({}),
            json!({"runAsNonRoot": true}),
            ImageAccount::Uid(0),
            Some("container has runAsNonRoot and image will run as root (pod: \"p_n(u)\", container: c)"),
        ),
        (
            json!({}),
            json!({"runAsNonRoot": true}),
            ImageAccount::Uid(1 << 31),
            Some(
                "container has runAsNonRoot and image has an invalid user id (2147483648). (Must be \
                 1-(2147483647)): (pod: \"p_n(u)\", container: c)",
            ),
        ),
    ] {
        let got = made(&pod(shared.clone(), own.clone()), image).err();
        assert_eq!(got.as_deref(), expected, "{shared} {own} {image:?}");
    }
}

#[test]
fn the_containers_fields_win_over_the_pods() {
    let shared = json!({"runAsUser": 1, "runAsGroup": 2, "seLinuxOptions": {"level": "s0"}});
    let got = fine(shared.clone(), json!({}));
    assert_eq!((got.run_as_user, got.run_as_group), (Some(int64(1)), Some(int64(2))));
    assert_eq!(got.selinux_options.map(|o| o.level).as_deref(), Some("s0"));
    let got = fine(shared, json!({"runAsUser": 3, "runAsGroup": 4, "seLinuxOptions": {"level": "s1"}}));
    assert_eq!((got.run_as_user, got.run_as_group), (Some(int64(3)), Some(int64(4))));
    assert_eq!(got.selinux_options.map(|o| o.level).as_deref(), Some("s1"));
}

#[test]
fn the_images_user_counts_where_no_field_names_one() {
    let plain = pod(json!({}), json!({}));
    let user = |image| made(&plain, image).map(|c| (c.run_as_user.map(|v| v.value), c.run_as_username));
    assert_eq!(user(ImageAccount::Uid(0)), Ok((Some(0), String::new())));
    assert_eq!(user(ImageAccount::Uid(7)), Ok((Some(7), String::new())));
    assert_eq!(user(ImageAccount::Name("app")), Ok((None, "app".to_owned())));
    let with_user = made(&pod(json!({"runAsUser": 9}), json!({})), ImageAccount::Name("app")).expect("a context");
    assert_eq!((with_user.run_as_user, with_user.run_as_username), (Some(int64(9)), String::new()));
}

#[test]
fn fields_of_the_container_alone() {
    let got = fine(json!({}), json!({}));
    assert!(!got.privileged && !got.readonly_rootfs && !got.no_new_privs && got.capabilities.is_none());
    assert_eq!((got.masked_paths.len(), got.masked_paths.last().map(String::as_str)), (13, Some("/sys/x")));
    assert_eq!(got.readonly_paths, READ_ONLY);
    let got = fine(
        json!({}),
        json!({"privileged": true, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
               "procMount": "Unmasked", "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}}),
    );
    assert!(got.privileged && got.readonly_rootfs && got.no_new_privs);
    assert!(got.masked_paths.is_empty() && got.readonly_paths.is_empty());
    let capabilities = got.capabilities.expect("requested");
    assert_eq!(
        (capabilities.add_capabilities, capabilities.drop_capabilities),
        (vec!["NET_ADMIN".into()], vec!["ALL".to_owned()])
    );
}

#[test]
fn seccomp_comes_from_container_pod_or_default() {
    let at = |kind: &str, name: Value| json!({"seccompProfile": {"type": kind, "localhostProfile": name}});
    let kind = |shared, own| fine(shared, own).seccomp.map(|p| (p.profile_type(), p.localhost_ref));
    let plain = |kind| Some((kind, String::new()));
    assert_eq!(kind(json!({}), json!({})), plain(ProfileType::Unconfined));
    assert_eq!(kind(at("RuntimeDefault", Value::Null), json!({})), plain(ProfileType::RuntimeDefault));
    assert_eq!(kind(at("RuntimeDefault", Value::Null), at("Unconfined", Value::Null)), plain(ProfileType::Unconfined));
    assert_eq!(
        kind(json!({}), at("Localhost", json!("a/b.json"))),
        Some((ProfileType::Localhost, "/r/seccomp/a/b.json".to_owned()))
    );
    let error = |name| made(&pod(json!({}), at("Localhost", name)), ImageAccount::Uid(0)).unwrap_err();
    assert_eq!(error(Value::Null), "localhostProfile must be set if seccompProfile type is Localhost.");
    assert!(error(json!("../x")).contains("must be a relative path"));
    assert!(error(json!("/x")).contains("must be a relative path"));
}

#[test]
fn seccomp_default_applies_without_a_profile() {
    let pod = pod(json!({}), json!({}));
    let inputs = SecurityInputs {
        image: ImageAccount::Uid(0),
        seccomp_root: Path::new("/"),
        seccomp_default: true,
        volume_groups: &[],
        machine_masked: &[],
        namespaces: cri::NamespaceOption::default(),
    };
    let got = of_container(&pod, &pod.containers()[0], inputs).expect("a context").seccomp;
    assert_eq!(got.map(|p| p.profile_type()), Some(ProfileType::RuntimeDefault));
}

#[test]
fn apparmor_comes_from_container_annotation_or_pod() {
    let at = |kind: &str, name: Value| json!({"appArmorProfile": {"type": kind, "localhostProfile": name}});
    let annotated = |text: &str| json!({"container.apparmor.security.beta.kubernetes.io/c": text});
    let check = |shared: Value, own: Value, annotations: Value, expected: &str| {
        let spec = json!({"securityContext": shared, "containers": [{"name": "c", "securityContext": own}]});
        let pod = pod_of(spec, annotations);
        let got = made(&pod, ImageAccount::Uid(0)).expect("a context");
        #[allow(deprecated, reason = "the old field is filled too")]
        let old = got.apparmor_profile;
        assert_eq!((old.as_str(), got.apparmor.is_some()), (expected, !expected.is_empty()));
    };
    check(json!({}), json!({}), json!({}), "");
    check(at("RuntimeDefault", Value::Null), json!({}), json!({}), "runtime/default");
    check(at("RuntimeDefault", Value::Null), json!({}), annotated("unconfined"), "unconfined");
    check(at("RuntimeDefault", Value::Null), json!({}), annotated("odd"), "runtime/default");
    check(json!({}), at("Localhost", json!("x")), annotated("unconfined"), "localhost/x");
    check(json!({}), json!({}), annotated("localhost/y"), "localhost/y");
    let missing = made(&pod(json!({}), at("Localhost", Value::Null)), ImageAccount::Uid(0)).unwrap_err();
    assert_eq!(missing, "missing localhost apparmor profile name");
}

#[test]
fn groups_are_those_of_pod_and_volumes() {
    let shared = json!({"fsGroup": 1, "supplementalGroups": [2, 3], "supplementalGroupsPolicy": "Strict"});
    let got = fine(shared.clone(), json!({}));
    assert_eq!(got.supplemental_groups, [1, 2, 3, 77]);
    assert_eq!(got.supplemental_groups_policy(), cri::SupplementalGroupsPolicy::Strict);
    let sandbox = of_sandbox(&pod(shared, json!({})), &[77], cri::NamespaceOption::default).expect("a context");
    assert_eq!(sandbox.supplemental_groups, [1, 77, 2, 3]);
    assert_eq!(sandbox.supplemental_groups_policy(), cri::SupplementalGroupsPolicy::Strict);
    let odd = made(&pod(json!({"supplementalGroupsPolicy": "X"}), json!({})), ImageAccount::Uid(0)).unwrap_err();
    assert_eq!(odd, "unsupported supplementalGroupsPolicy: X");
}

#[test]
fn a_sandbox_is_confined_and_privileged_where_a_container_is() {
    let context = |spec| of_sandbox(&pod_of(spec, json!({})), &[], cri::NamespaceOption::default).expect("a context");
    let none = context(json!({"containers": [{"name": "c"}]}));
    assert!(!none.privileged && none.namespace_options.is_none());
    assert_eq!(none.seccomp.map(|p| p.profile_type()), Some(ProfileType::RuntimeDefault));
    let with = context(json!({"securityContext": {"runAsUser": 5}, "containers": [{"name": "c"}]}));
    assert_eq!((with.run_as_user, with.namespace_options.is_some()), (Some(int64(5)), true));
    let privileged = json!({"name": "x", "securityContext": {"privileged": true}});
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        let mut spec = json!({"containers": [{"name": "c"}]});
        spec[list] = json!([privileged]);
        assert!(context(spec).privileged, "{list}");
    }
}

#[test]
fn namespaces_follow_the_pod_and_the_target() {
    let userns = || crate::runtime::request::userns::options(None);
    let check = |spec: Value, target: Option<&str>, expected: (Mode, Mode, Mode, &str)| {
        let mut spec = spec;
        spec["containers"] = json!([{"name": "c"}]);
        let target = target.map(ContainerId::new);
        let got = namespaces(&pod_of(spec.clone(), json!({})), target.as_ref(), userns());
        assert_eq!((got.network(), got.pid(), got.ipc(), got.target_id.as_str()), expected, "{spec}");
    };
    check(json!({}), None, (Mode::Pod, Mode::Container, Mode::Pod, ""));
    check(json!({}), Some("id"), (Mode::Pod, Mode::Target, Mode::Pod, "id"));
    check(json!({"shareProcessNamespace": true}), Some("id"), (Mode::Pod, Mode::Pod, Mode::Pod, ""));
    check(
        json!({"hostPID": true, "hostNetwork": true, "hostIPC": true}),
        Some("id"),
        (Mode::Node, Mode::Node, Mode::Node, ""),
    );
}
