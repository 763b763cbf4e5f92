//! SELinux mount labels (`-o context="…"`), used instead of relabeling each file. Pure.
//!
//! Applies only on a node with SELinux, and to volumes whose plugin supports mount labels. Implements spec 07 §11.

use std::collections::BTreeSet;

use super::spec::VolumeSpec;
use berth_types::{Pod, api};

/// Node policy: SELinux context of container files, and which volumes are mounted with labels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SelinuxPolicy {
    user: String,
    role: String,
    kind: String,
    level: String,
    all_modes: bool,
}

/// SELinux labels of a volume in a pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Label {
    /// Label that all pods of the volume must agree on (`originalSELinuxLabel`).
    pub original: Option<String>,
    /// Label that the volume is mounted with (`effectiveSELinuxLabel`).
    pub mounted: Option<String>,
}

/// Scope of an SELinux label conflict, as counted in the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConflictScope {
    /// A container requests an invalid label.
    Container,
    /// Containers of the pod request different labels.
    Pod,
    /// Pods that share the volume request different labels.
    Volume,
}

/// Label conflict or error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LabelError {
    /// Scope of the conflict.
    pub odds: ConflictScope,
    /// Message of the upstream kubelet.
    pub text: String,
    /// The pod is denied the volume; otherwise the conflict is only counted.
    pub is_binding: bool,
}

impl SelinuxPolicy {
    /// Parses a file context such as `system_u:object_r:container_file_t:s0`; `None` if it is invalid. With
    /// `all_modes`, volumes of every access mode are mounted with a label, not only those for one pod (gate
    /// `SELinuxMount`).
    pub fn new(context: &str, all_modes: bool) -> Option<Self> {
        let mut parts = context.splitn(4, ':').map(str::to_owned);
        let (user, role, kind, level) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let policy = Self { user, role, kind, level, all_modes };
        policy.label(&api::SELinuxOptions::default()).is_ok().then_some(policy)
    }

    /// Returns the label of files for a container with these options.
    fn label(&self, options: &api::SELinuxOptions) -> Result<String, String> {
        let own = |option: &Option<String>, default: &str| {
            option.clone().filter(|text| !text.is_empty()).unwrap_or_else(|| default.to_owned())
        };
        // Files keep the role and type of files, whatever the process options are.
        let (user, level) = (own(&options.user, &self.user), own(&options.level, &self.level));
        // The label becomes part of a quoted mount option.
        let is_name =
            |text: &String| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
        let is_level = |text: &String| {
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-:,".contains(&b))
        };
        if !(is_name(&user) && is_name(&self.role) && is_name(&self.kind) && is_level(&level)) {
            let components = format!("user {user:?}, level {level:?}");
            return Err(format!(
                "failed to construct SELinux label from context: invalid label component: {components}"
            ));
        }
        Ok(format!("{user}:{}:{}:{level}", self.role, self.kind))
    }

    /// Whether label conflicts of the volume are enforced.
    pub fn is_binding(&self, spec: &VolumeSpec) -> bool {
        self.all_modes || spec.is_for_one_pod()
    }

    /// Decides the label of a volume whose plugin supports mount labels; `volume` is its name in the pod.
    ///
    /// # Errors
    /// If the containers request an invalid label or different labels.
    pub fn decide(&self, pod: &Pod, volume: &str, spec: &VolumeSpec) -> Result<Label, LabelError> {
        let context = pod.spec().security_context.as_ref();
        let is_relabelled =
            context.and_then(|of| of.se_linux_change_policy.as_deref()).is_some_and(|policy| policy == "Recursive");
        let is_binding = self.is_binding(spec);
        let refused = |odds, text| LabelError { odds, text, is_binding: is_binding && !is_relabelled };
        let labels: Result<BTreeSet<String>, String> =
            options_of(pod, volume).into_iter().map(|options| self.label(options)).collect();
        let mut labels = labels.map_err(|text| refused(ConflictScope::Container, text))?;
        if labels.len() > 1 {
            let all = labels.into_iter().collect::<Vec<_>>().join(",");
            return Err(refused(ConflictScope::Pod, format!("multiple SELinux labels found: {all}")));
        }
        let asked = labels.pop_first().filter(|_| !is_relabelled);
        Ok(Label { mounted: asked.clone().filter(|_| is_binding), original: asked })
    }
}

/// Returns the options of containers that mount the volume; omits containers with none.
fn options_of<'a>(pod: &'a Pod, volume: &str) -> Vec<&'a api::SELinuxOptions> {
    type MountsAndContext<'a> = (Option<&'a [api::VolumeMount]>, Option<&'a api::SecurityContext>);
    let shared = pod.spec().security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
    let plain = pod.init_containers().iter().chain(pod.containers());
    let plain = plain.map(|c| -> MountsAndContext<'a> { (c.volume_mounts.as_deref(), c.security_context.as_ref()) });
    let late = pod.ephemeral_containers().iter();
    let late = late.map(|c| -> MountsAndContext<'a> { (c.volume_mounts.as_deref(), c.security_context.as_ref()) });
    let using =
        plain.chain(late).filter(|(mounts, _)| mounts.unwrap_or_default().iter().any(|mount| mount.name == volume));
    let effective = using.filter_map(|(_, own)| own.and_then(|own| own.se_linux_options.as_ref()).or(shared));
    let is_empty = |options: &&api::SELinuxOptions| **options == api::SELinuxOptions::default();
    effective.filter(|options| !is_empty(options)).collect()
}

/// Formats the conflict of a pod with another pod of the volume.
pub fn conflict(volume: &str, there: Option<&str>, asked: Option<&str>) -> String {
    let (there, asked) = (there.unwrap_or_default(), asked.unwrap_or_default());
    format!("conflicting SELinux labels of volume {volume}: {there:?} and {asked:?}")
}

/// Formats the wait for the unmount of a terminating pod's volume with a different label.
pub fn waiting(volume: &str) -> String {
    format!(
        "waiting for unmount of volume {volume:?}, because it is already mounted to a different pod with a different \
         SELinux label"
    )
}

/// Formats the mount option of a label.
pub fn option(label: &str) -> String {
    format!("context=\"{label}\"")
}

/// Returns the label of a mount from its options in the mount table.
pub fn label_of_mount(options: &str) -> Option<String> {
    let mut is_quoted = false;
    let all = options.split(|letter| {
        is_quoted ^= letter == '"';
        letter == ',' && !is_quoted
    });
    let label = all.into_iter().find_map(|option| option.strip_prefix("context="))?;
    Some(label.trim_matches('"').to_owned()).filter(|label| !label.is_empty())
}

/// Returns the access mode for the metrics: the widest of the volume's modes.
pub fn access_mode(spec: &VolumeSpec) -> &'static str {
    if spec.as_persistent().is_none() {
        return "inline";
    }
    let modes =
        [("ReadWriteMany", "RWX"), ("ReadOnlyMany", "ROX"), ("ReadWriteOnce", "RWO"), ("ReadWriteOncePod", "RWOP")];
    let has = |name: &str| spec.access_modes().iter().any(|mode| mode == name);
    modes.into_iter().find(|(name, _)| has(name)).map_or("", |(_, short)| short)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    const FILES: &str = "system_u:object_r:container_file_t:s0";

    fn labelled(level: &str) -> String {
        format!("system_u:object_r:container_file_t:{level}")
    }

    fn spec(modes: &Value) -> VolumeSpec {
        let volume = serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": {"accessModes": modes}}));
        VolumeSpec::persistent(Arc::new(volume.expect("a volume")), Arc::default(), false)
    }

    /// Pod with these options, whose containers `a` and `b` mount `v` with theirs.
    fn pod(own: Value, a: Value, b: Value) -> Pod {
        let container = |name: &str, options: Value| json!({"name": name, "securityContext": {"seLinuxOptions": options}, "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let other = json!({"name": "other", "securityContext": {"seLinuxOptions": {"level": "s0:c9"}},
            "volumeMounts": [{"name": "w", "mountPath": "/w"}]});
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"securityContext": own,
            "initContainers": [container("a", a)], "containers": [container("b", b), other]}});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    #[test]
    fn a_volume_has_the_label_of_all_its_containers() {
        let null = || Value::Null;
        let level = |level: &str| json!({"level": level});
        let pods = |level: &str| json!({"seLinuxOptions": {"level": level}});
        let one = ["ReadWriteOncePod"];
        let (c1, c2) = (labelled("s0:c1,c2"), labelled("s0:c2"));
        for (own, a, b, expected) in [
            (null(), null(), null(), Ok(None)),
            (null(), json!({}), json!({"level": ""}), Ok(Some(labelled("s0")))),
            (pods("s0:c1,c2"), null(), null(), Ok(Some(c1.clone()))),
            (null(), level("s0:c1,c2"), null(), Ok(Some(c1.clone()))),
            (null(), level("s0:c1,c2"), level("s0:c1,c2"), Ok(Some(c1.clone()))),
            (pods("s0:c2"), level("s0:c1,c2"), null(), Err(format!("multiple SELinux labels found: {c1},{c2}"))),
            // `type` and `role` apply to processes; files have their own.
            (null(), json!({"type": "spc_t"}), json!({"role": "r"}), Ok(Some(FILES.to_owned()))),
            (null(), json!({"user": "u"}), null(), Ok(Some("u:object_r:container_file_t:s0".to_owned()))),
        ] {
            let case = format!("{own} {a} {b}");
            let decided =
                SelinuxPolicy::new(FILES, false).expect("a context").decide(&pod(own, a, b), "v", &spec(&json!(one)));
            let expected = match expected {
                Ok(label) => Ok(Label { mounted: label.clone(), original: label }),
                Err(text) => Err(LabelError { odds: ConflictScope::Pod, text, is_binding: true }),
            };
            assert_eq!(decided, expected, "{case}");
        }
    }

    #[test]
    fn only_what_is_for_one_pod_is_mounted_with_it_unless_all_are() {
        let asking = |policy: &str| {
            pod(json!({"seLinuxOptions": {"level": "s0:c1"}, "seLinuxChangePolicy": policy}), Value::Null, Value::Null)
        };
        let label = || Some(labelled("s0:c1"));
        for (modes, all_modes, policy, expected) in [
            (json!(["ReadWriteOncePod"]), false, "MountOption", (label(), label())),
            (json!(["ReadWriteOnce"]), false, "MountOption", (label(), None)),
            (json!(["ReadWriteOncePod", "ReadWriteOnce"]), false, "MountOption", (label(), None)),
            (json!(["ReadWriteMany"]), true, "MountOption", (label(), label())),
            (json!(["ReadWriteOncePod"]), false, "Recursive", (None, None)),
            (json!(["ReadWriteMany"]), true, "Recursive", (None, None)),
        ] {
            let decided =
                SelinuxPolicy::new(FILES, all_modes).expect("a context").decide(&asking(policy), "v", &spec(&modes));
            let (asked, mounted) = expected;
            assert_eq!(decided, Ok(Label { original: asked, mounted }), "{modes} {all_modes} {policy}");
        }
    }

    #[test]
    fn label_conflicts_bind_only_where_labels_are_enforced() {
        let two = |policy: Value| {
            let own = json!({"seLinuxOptions": {"level": "s0:c2"}, "seLinuxChangePolicy": policy});
            pod(own, json!({"level": "s0:c1"}), Value::Null)
        };
        for (modes, all_modes, policy, expected) in [
            ("ReadWriteOncePod", false, Value::Null, true),
            ("ReadWriteOnce", false, Value::Null, false),
            ("ReadWriteOnce", true, Value::Null, true),
            ("ReadWriteOncePod", true, json!("Recursive"), false),
        ] {
            let policy_of_node = SelinuxPolicy::new(FILES, all_modes).expect("a context");
            let refusal = policy_of_node.decide(&two(policy), "v", &spec(&json!([modes]))).expect_err("two labels");
            assert_eq!((refusal.odds, refusal.is_binding), (ConflictScope::Pod, expected), "{modes} {all_modes}");
        }
    }

    #[test]
    fn what_is_no_label_is_no_option_of_a_mount() {
        let policy = SelinuxPolicy::new(FILES, true).expect("a context");
        for bad in ["s0\",suid,context=\"x", "s0 c1", "s0\n", "s0\\", "s0;x"] {
            let pod = pod(Value::Null, json!({"level": bad}), Value::Null);
            let refusal = policy.decide(&pod, "v", &spec(&json!(["ReadWriteOnce"]))).expect_err(bad);
            assert_eq!((refusal.odds, refusal.is_binding), (ConflictScope::Container, true), "{bad}");
            assert!(refusal.text.starts_with("failed to construct SELinux label from context"), "{}", refusal.text);
        }
        for bad in ["", "a:b:c", "::::", "a:b:c:\"", "a b:c:d:s0"] {
            assert_eq!(SelinuxPolicy::new(bad, false), None, "{bad}");
        }
        assert!(SelinuxPolicy::new("u:r:t:s0:c1,c2", false).is_some());
    }

    #[test]
    fn the_mount_table_shows_the_label() {
        let context = option(&labelled("s0:c1,c2"));
        assert_eq!(context, "context=\"system_u:object_r:container_file_t:s0:c1,c2\"");
        for (options, expected) in [
            (format!("rw,{context},noquota"), Some(labelled("s0:c1,c2"))),
            (context, Some(labelled("s0:c1,c2"))),
            ("rw,context=a:b:c:s0,x".to_owned(), Some("a:b:c:s0".to_owned())),
            ("rw,seclabel".to_owned(), None),
            ("rw,rootcontext=a:b:c:s0,fscontext=x".to_owned(), None),
            ("rw,x=\"a,context=b\"".to_owned(), None),
            ("context=".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(label_of_mount(&options), expected, "{options}");
        }
    }

    #[test]
    fn access_mode_returns_the_widest_mode() {
        for (modes, expected) in [
            (json!(["ReadWriteOncePod"]), "RWOP"),
            (json!(["ReadWriteOncePod", "ReadWriteOnce"]), "RWO"),
            (json!(["ReadWriteOnce", "ReadOnlyMany"]), "ROX"),
            (json!(["ReadOnlyMany", "ReadWriteMany"]), "RWX"),
            (json!([]), ""),
        ] {
            assert_eq!(access_mode(&spec(&modes)), expected, "{modes}");
        }
        let inline = serde_json::from_value(json!({"name": "v", "csi": {"driver": "d"}})).expect("a volume");
        assert_eq!(access_mode(&VolumeSpec::inline(&inline)), "inline");
    }

    #[test]
    fn texts_are_those_of_the_reference() {
        assert_eq!(
            conflict("pv", Some("a:b:c:s0"), None),
            "conflicting SELinux labels of volume pv: \"a:b:c:s0\" and \"\""
        );
        assert_eq!(
            waiting("kubernetes.io/csi/d^h"),
            "waiting for unmount of volume \"kubernetes.io/csi/d^h\", because it is already mounted to a different pod \
             with a different SELinux label"
        );
    }
}
