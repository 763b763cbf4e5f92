//! What hooks of devices are told of a container: its state, and the `config.json` of its bundle. Pure.
//!
//! Nothing of ours reads that file. It has what hooks of vendors look for: where the root is, whose files, what is executed.
//! Behaviour: spec 09a §8.4; OCI runtime specification 1.2 (State, Configuration, POSIX-platform Hooks).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::facts::Inputs;
use crate::embedded::shim::plan::{Access, Hooks, LaunchPlan, Mount, Propagation, Source};

/// The version of the specification they are told.
const VERSION: &str = "1.2.0";

/// The hooks of a container's devices; none: nobody wants any.
pub fn hooks(inputs: &Inputs<'_>) -> Option<Hooks> {
    let all = inputs.found.edits.hooks.clone();
    if all.is_empty() {
        return None;
    }
    let bundle = inputs.bundle.clone();
    let state = json!({
        "ociVersion": VERSION,
        "id": inputs.id,
        "bundle": bundle,
        "annotations": annotations(inputs),
    });
    let state = state.to_string();
    Some(Hooks { all, bundle, state: state.strip_prefix('{').unwrap_or(&state).to_owned() })
}

/// Those of the request, and which container it is, as other runtimes call that.
fn annotations(inputs: &Inputs<'_>) -> BTreeMap<String, String> {
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

/// The container as its bundle says it.
pub fn config(inputs: &Inputs<'_>, plan: &LaunchPlan) -> Value {
    let process = &plan.process;
    let devices = plan.devices.iter().map(|device| {
        json!({
            "path": device.path, "type": device.kind, "major": device.numbers.0, "minor": device.numbers.1,
            "fileMode": device.mode, "uid": device.uid, "gid": device.gid,
        })
    });
    json!({
        "ociVersion": VERSION,
        // Where the root is attached when hooks of the container's namespaces are executed.
        "root": {"path": plan.root.stage, "readonly": plan.root.is_read_only},
        "hostname": inputs.sandbox.hostname,
        "process": {
            "terminal": process.terminal.is_some(),
            "user": {"uid": process.uid, "gid": process.gid, "additionalGids": process.groups},
            "args": process.args,
            "env": process.env,
            "cwd": process.cwd,
            "noNewPrivileges": process.no_new_privileges,
            "oomScoreAdj": process.oom_score_adj,
        },
        "mounts": plan.mounts.iter().map(mount).collect::<Vec<_>>(),
        "annotations": annotations(inputs),
        "linux": {
            "devices": devices.collect::<Vec<_>>(),
            "maskedPaths": plan.masked,
            "readonlyPaths": plan.read_only,
        },
    })
}

fn mount(mount: &Mount) -> Value {
    let (kind, source, mut options) = match &mount.source {
        Source::Bind(path) => ("bind", path.display().to_string(), vec!["rbind".to_owned()]),
        Source::New { kind, data } => {
            let options = data.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect();
            (kind.as_str(), kind.clone(), options)
        }
        Source::Layers { .. } => ("overlay", "overlay".to_owned(), Vec::new()),
    };
    let access = match mount.access {
        Access::ReadWrite => "rw",
        Access::ReadOnly => "ro",
        Access::RecursivelyReadOnly => "rro",
    };
    let propagation = match mount.propagation {
        Propagation::Private => "rprivate",
        Propagation::Slave => "rslave",
        Propagation::Shared => "rshared",
    };
    let flags = [(1 << 1, "nosuid"), (1 << 2, "nodev"), (1 << 3, "noexec")];
    let flags = flags.into_iter().filter(|(bit, _)| mount.flags & bit != 0).map(|(_, name)| name);
    options.extend(flags.chain([access, propagation]).map(str::to_owned));
    json!({"destination": mount.target, "type": kind, "source": source, "options": options})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded::{
        launch::{self, cdi, testing},
        shim::plan::{Hook, Moment},
    };

    #[test]
    fn hooks_are_told_which_container_it_is() {
        let mut facts = testing::Facts::default();
        let (container, sandbox) = (testing::container_config(), testing::sandbox_config());
        assert_eq!(hooks(&facts.inputs(&container, &sandbox)), None);
        let hook =
            Hook { moment: Moment::Prestart, path: "/h".into(), args: Vec::new(), env: Vec::new(), limit_ms: None };
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
        let proc = config["mounts"].as_array().and_then(|all| all.iter().find(|m| m["destination"] == "/proc"));
        let expected = json!({"destination": "/proc", "type": "proc", "source": "proc",
            "options": ["nosuid", "nodev", "noexec", "rw", "rprivate"]});
        assert_eq!(proc, Some(&expected));
    }
}
