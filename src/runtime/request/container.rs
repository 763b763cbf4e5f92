//! CRI container configuration. Pure. Implements spec 03a §6.1.
//!
//! Labels and annotations are the only record that outlives the agent: hash, restart count, termination
//! message, grace periods, preStop hook, and ports are read back from them.

use std::collections::HashMap;

use berth_proto::cri;
use berth_types::{
    Pod, api,
    expansion::{TooLong, Variables},
    hash::container_hash,
};

/// Label with the pod's name.
pub const LABEL_POD_NAME: &str = "io.kubernetes.pod.name";
/// Label with the pod's namespace.
pub const LABEL_POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Label with the pod's UID.
pub const LABEL_POD_UID: &str = "io.kubernetes.pod.uid";
/// Label with the container's name.
pub const LABEL_CONTAINER_NAME: &str = "io.kubernetes.container.name";

/// Inputs of a container configuration.
pub struct ContainerParts<'a> {
    /// Pod that the container belongs to.
    pub pod: &'a Pod,
    /// Definition of the container.
    pub container: &'a api::Container,
    /// Restart count: `metadata.attempt` and log file name.
    pub restart_count: u32,
    /// Reference of the resolved image.
    pub image: &'a str,
    /// Environment variables; names are unique.
    pub env: &'a [(String, String)],
    /// Annotations from device plugins; those of the agent overwrite them.
    pub annotations: &'a [(String, String)],
    /// All mounts, in order.
    pub mounts: Vec<cri::Mount>,
    /// All devices.
    pub devices: Vec<cri::Device>,
    /// Qualified CDI device names from the resource managers.
    pub cdi_devices: Vec<cri::CdiDevice>,
    /// Linux resources of the container.
    pub resources: cri::LinuxContainerResources,
    /// Security context.
    pub security: cri::LinuxContainerSecurityContext,
    /// Whether `lifecycle.stopSignal` is honored (gate `ContainerStopSignals`).
    pub stop_signals: bool,
}

/// Builds the configuration of a container.
///
/// # Errors
/// Expanded variables make the command line too long.
pub fn config(parts: ContainerParts<'_>) -> Result<cri::ContainerConfig, TooLong> {
    let ContainerParts { pod, container, .. } = parts;
    let variables = Variables::new(parts.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let list = |list: &Option<Vec<String>>| variables.expand_all(list.as_deref().unwrap_or_default());
    let mut annotations: HashMap<String, String> = parts.annotations.iter().cloned().collect();
    annotations.extend(self::annotations(pod, container, parts.restart_count));
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: parts.restart_count }),
        image: Some(cri::ImageSpec {
            image: parts.image.to_owned(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..Default::default()
        }),
        command: list(&container.command)?,
        args: list(&container.args)?,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: parts
            .env
            .iter()
            .map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone().into_bytes() })
            .collect(),
        mounts: parts.mounts,
        devices: parts.devices,
        labels: labels(pod, &container.name),
        annotations,
        log_path: log_path(&container.name, parts.restart_count),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(parts.resources),
            security_context: Some(parts.security),
        }),
        windows: None,
        cdi_devices: parts.cdi_devices,
        stop_signal: if parts.stop_signals { stop_signal(container).into() } else { 0 },
    })
}

/// Path of a log file relative to the pod's log directory.
pub fn log_path(container: &str, restart_count: u32) -> String {
    format!("{container}/{restart_count}.log")
}

/// Name of a pod's directory below `podLogsDir`.
pub fn pod_log_directory(pod: &Pod) -> String {
    format!("{}_{}_{}", pod.namespace(), pod.name(), pod.uid())
}

/// The restart count of a container without an instance in the runtime: the largest number of a log
/// file (`2.log`, `2.log.20240101`) plus 1, or 0 without any.
pub fn restart_count_of_logs<'a>(file_names: impl IntoIterator<Item = &'a str>) -> u32 {
    let number = |name: &str| -> Option<u32> {
        let (digits, _) = name.split_once(".log")?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    file_names.into_iter().filter_map(number).max().map_or(0, |n| n.saturating_add(1))
}

fn labels(pod: &Pod, container: &str) -> HashMap<String, String> {
    let mut labels = pod_labels(pod);
    labels.insert(LABEL_CONTAINER_NAME.to_owned(), container.to_owned());
    labels
}

/// Labels that identify the pod of a sandbox or container.
pub fn pod_labels(pod: &Pod) -> HashMap<String, String> {
    HashMap::from([
        (LABEL_POD_NAME.to_owned(), pod.name().to_owned()),
        (LABEL_POD_NAMESPACE.to_owned(), pod.namespace().to_owned()),
        (LABEL_POD_UID.to_owned(), pod.uid().to_string()),
    ])
}

fn annotations(pod: &Pod, container: &api::Container, restart_count: u32) -> Vec<(String, String)> {
    let image = container.image.as_deref().unwrap_or_default();
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let mut all = vec![
        ("io.kubernetes.container.hash", format!("{:x}", container_hash(&container.name, image))),
        ("io.kubernetes.container.restartCount", restart_count.to_string()),
        ("io.kubernetes.container.terminationMessagePath", text(&container.termination_message_path)),
        ("io.kubernetes.container.terminationMessagePolicy", text(&container.termination_message_policy)),
    ];
    if let Some(seconds) = pod.metadata.deletion_grace_period_seconds {
        all.push(("io.kubernetes.pod.deletionGracePeriod", seconds.to_string()));
    }
    if let Some(seconds) = pod.spec().termination_grace_period_seconds {
        all.push(("io.kubernetes.pod.terminationGracePeriod", seconds.to_string()));
    }
    if let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) {
        all.extend(json(hook).map(|text| ("io.kubernetes.container.preStopHandler", text)));
    }
    if let Some(ports) = container.ports.as_ref().filter(|p| !p.is_empty()) {
        all.extend(json(ports).map(|text| ("io.kubernetes.container.ports", text)));
    }
    all.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// `None` for values that JSON cannot represent, which API objects do not contain.
fn json(value: &impl serde::Serialize) -> Option<String> {
    serde_json::to_string(value).ok()
}

fn stop_signal(container: &api::Container) -> cri::Signal {
    let name = container.lifecycle.as_ref().and_then(|l| l.stop_signal.as_deref());
    let spelled = name.map(|n| n.replace('+', "PLUS").replace('-', "MINUS"));
    spelled.and_then(|n| cri::Signal::from_str_name(&n)).unwrap_or(cri::Signal::RuntimeDefault)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn made(container: Value, env: &[(&str, &str)]) -> cri::ContainerConfig {
        let mut container = container;
        let fields = container.as_object_mut().expect("an object");
        fields.entry("name").or_insert("foo".into());
        fields.entry("image").or_insert("bar".into());
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u", "deletionGracePeriodSeconds": 7},
            "spec": {"terminationGracePeriodSeconds": 30, "containers": [container]}});
        let pod = Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete");
        let env: Vec<_> = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        config(ContainerParts {
            pod: &pod,
            container: &pod.containers()[0],
            restart_count: 3,
            image: "sha256:1",
            env: &env,
            annotations: &[("device".into(), "x".into()), ("io.kubernetes.container.hash".into(), "mine".into())],
            mounts: vec![],
            devices: vec![],
            cdi_devices: vec![],
            resources: cri::LinuxContainerResources::default(),
            security: cri::LinuxContainerSecurityContext::default(),
            stop_signals: true,
        })
        .expect("short")
    }

    #[test]
    fn labels_and_annotations_remember_what_a_restart_forgets() {
        let got = made(
            json!({"terminationMessagePath": "/t", "terminationMessagePolicy": "File",
                   "ports": [{"containerPort": 80}], "lifecycle": {"preStop": {"exec": {"command": ["x"]}}}}),
            &[],
        );
        let labels: std::collections::BTreeMap<_, _> = got.labels.into_iter().collect();
        assert_eq!(
            labels.into_iter().collect::<Vec<_>>(),
            [
                ("io.kubernetes.container.name".to_owned(), "foo".to_owned()),
                ("io.kubernetes.pod.name".to_owned(), "p".to_owned()),
                ("io.kubernetes.pod.namespace".to_owned(), "n".to_owned()),
                ("io.kubernetes.pod.uid".to_owned(), "u".to_owned()),
            ]
        );
        for (key, value) in [
            ("device", "x"),
            // AC-03a-12
            ("io.kubernetes.container.hash", "11a6d6d6"),
            ("io.kubernetes.container.restartCount", "3"),
            ("io.kubernetes.container.terminationMessagePath", "/t"),
            ("io.kubernetes.container.terminationMessagePolicy", "File"),
            ("io.kubernetes.pod.deletionGracePeriod", "7"),
            ("io.kubernetes.pod.terminationGracePeriod", "30"),
            ("io.kubernetes.container.preStopHandler", r#"{"exec":{"command":["x"]}}"#),
            ("io.kubernetes.container.ports", r#"[{"containerPort":80}]"#),
        ] {
            assert_eq!(got.annotations.get(key).map(String::as_str), Some(value), "{key}");
        }
        assert_eq!((got.annotations.len(), got.log_path.as_str()), (9, "foo/3.log"));
        assert_eq!(got.metadata.map(|m| (m.name, m.attempt)), Some(("foo".to_owned(), 3)));
        let image = got.image.expect("an image");
        assert_eq!((image.image.as_str(), image.user_specified_image.as_str()), ("sha256:1", "bar"));
        assert_eq!(made(json!({}), &[]).annotations.len(), 7);
    }

    #[test]
    fn command_and_arguments_are_expanded_by_the_final_environment() {
        let got = made(
            json!({"command": ["$(A)", "$$(A)", "$(NONE)"], "args": ["x$(A)y"], "workingDir": "/w", "stdin": true,
                   "stdinOnce": true, "tty": true}),
            &[("A", "1")],
        );
        assert_eq!((got.command, got.args), (vec!["1".into(), "$(A)".into(), "$(NONE)".into()], vec!["x1y".into()]));
        assert!(got.stdin && got.stdin_once && got.tty);
        assert_eq!(got.envs, [cri::KeyValue { key: "A".into(), value: b"1".to_vec() }]);
        assert_eq!(got.working_dir, "/w");
    }

    #[test]
    fn a_stop_signal_is_converted_by_its_name() {
        let signal = |name: &str| made(json!({"lifecycle": {"stopSignal": name}}), &[]).stop_signal();
        assert_eq!(signal("SIGUSR1"), cri::Signal::Sigusr1);
        assert_eq!(signal("SIGRTMIN+3"), cri::Signal::Sigrtminplus3);
        assert_eq!(signal("SIGRTMAX-1"), cri::Signal::Sigrtmaxminus1);
        assert_eq!(signal("odd"), cri::Signal::RuntimeDefault);
        assert_eq!(made(json!({}), &[]).stop_signal(), cri::Signal::RuntimeDefault);
    }

    #[test]
    fn the_restart_count_is_derived_from_log_files() {
        for (names, count) in [
            // AC-03a-13
            (vec!["0.log.rotated", "2.log"], 3),
            (vec![], 0),
            (vec!["x.log", "log", "5", "-1.log", ".log"], 0),
            (vec!["0.log"], 1),
            (vec!["99999999999999999999.log", "4.log.gz"], 5),
            (vec!["4294967295.log"], u32::MAX),
        ] {
            assert_eq!(restart_count_of_logs(names.iter().copied()), count, "{names:?}");
        }
    }
}
