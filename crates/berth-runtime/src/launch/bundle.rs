//! OCI state and bundle `config.json` for CDI hooks. Pure.
//!
//! Berth itself never reads that file. It contains what vendor hooks read: the root, the id mappings, and the process.
//! Implements spec 09a §8.4; OCI runtime specification 1.2 (State, Configuration, POSIX-platform Hooks).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{inputs::LaunchInputs, oci};
use berth_shim::plan::{Hooks, LaunchPlan};

/// The CDI hooks of a container's devices; `None` where there are none.
pub fn hooks(inputs: &LaunchInputs<'_>) -> Option<Hooks> {
    let all = inputs.found.edits.hooks.clone();
    if all.is_empty() {
        return None;
    }
    let bundle = inputs.bundle.clone();
    let state = json!({
        "ociVersion": oci::VERSION,
        "id": inputs.id,
        "bundle": bundle,
        "annotations": annotations(inputs),
    });
    let state = state.to_string();
    Some(Hooks { all, bundle, state: state.strip_prefix('{').unwrap_or(&state).to_owned() })
}

/// The annotations of the request plus containerd's `io.kubernetes.cri.*` annotations, which identify the container.
fn annotations(inputs: &LaunchInputs<'_>) -> BTreeMap<String, String> {
    let mut all: BTreeMap<String, String> = inputs.config.annotations.clone().into_iter().collect();
    let pod = inputs.sandbox.config.metadata.clone().unwrap_or_default();
    let container = inputs.config.metadata.clone().unwrap_or_default();
    for (key, value) in [
        ("container-type", "container"),
        ("container-name", &container.name),
        ("sandbox-id", inputs.sandbox.id),
        ("sandbox-name", &pod.name),
        ("sandbox-namespace", &pod.namespace),
        ("sandbox-uid", &pod.uid),
    ] {
        all.insert(format!("io.kubernetes.cri.{key}"), value.to_owned());
    }
    all
}

/// The OCI runtime configuration (`config.json`) of the container.
pub fn config(inputs: &LaunchInputs<'_>, plan: &LaunchPlan) -> Value {
    let mut spec = oci::spec(plan);
    spec["hostname"] = json!(inputs.sandbox.hostname);
    spec["annotations"] = json!(annotations(inputs));
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{self, cdi, fixture};
    use berth_shim::plan::{Hook, HookPoint};

    #[test]
    fn hook_state_identifies_the_container() {
        let mut facts = fixture::Facts::default();
        let (container, sandbox) = (fixture::container_config(), fixture::sandbox_config());
        assert_eq!(hooks(&facts.inputs(&container, &sandbox)), None);
        let hook =
            Hook { moment: HookPoint::Prestart, path: "/h".into(), args: Vec::new(), env: Vec::new(), limit_ms: None };
        facts.found.edits = cdi::Edits { hooks: vec![hook.clone()], ..cdi::Edits::default() };
        let inputs = facts.inputs(&container, &sandbox);
        let plan = launch::launch(&inputs).expect("a plan").plan;
        let hooks = plan.hooks.as_deref().expect("hooks");
        assert_eq!((hooks.all.as_slice(), hooks.bundle.to_str()), (&[hook][..], Some("/bundle")));
        let state: Value = serde_json::from_str(&format!("{{{}", hooks.state)).expect("JSON");
        assert_eq!((&state["id"], &state["bundle"]), (&json!("container-1"), &json!("/bundle")));
        assert_eq!(state["annotations"]["io.kubernetes.cri.container-name"], "c");
        let config = config(&inputs, &plan);
        assert_eq!(config["root"], json!({"path": "/run/stage", "readonly": false}));
        assert_eq!(config["process"]["args"], json!(["/bin/true"]));
        assert!(config["annotations"].is_object() && config["hostname"].is_string());
    }
}
