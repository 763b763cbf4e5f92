//! Converts a launch plan to an OCI runtime configuration for CDI hooks and `crictl inspect`. Pure.
//!
//! Berth itself never reads the result. Implements the OCI runtime specification 1.2 (Configuration).

use serde_json::{Value, json};

use super::{capabilities, limits::RESOURCES};
use berth_shim::plan::{Access, Capabilities, LaunchPlan, Mount, MountKind, ProcessPlan, Propagation};

/// Version of the OCI runtime specification.
pub const VERSION: &str = "1.2.0";

/// The OCI configuration of a plan. The caller fills in namespaces, annotations, and the host name.
pub fn spec(plan: &LaunchPlan) -> Value {
    let devices = plan.devices.iter().map(|device| {
        json!({
            "path": device.path, "type": device.kind, "major": device.numbers.0, "minor": device.numbers.1,
            "fileMode": device.mode, "uid": device.uid, "gid": device.gid,
        })
    });
    json!({
        "ociVersion": VERSION,
        "process": process(&plan.process),
        // Mount point of the root while hooks run in the container's namespaces.
        "root": {"path": plan.root.stage, "readonly": plan.root.is_read_only},
        "mounts": plan.mounts.iter().map(mount).collect::<Vec<_>>(),
        "linux": {
            "devices": devices.collect::<Vec<_>>(),
            "maskedPaths": plan.masked,
            "readonlyPaths": plan.read_only,
        },
    })
}

fn process(process: &ProcessPlan) -> Value {
    let limits = process.limits.iter().filter_map(|(number, soft, hard)| {
        let name = RESOURCES.get(usize::try_from(*number).ok()?)?;
        Some(json!({"type": format!("RLIMIT_{}", name.to_uppercase()), "soft": soft, "hard": hard}))
    });
    json!({
        "terminal": process.terminal.is_some(),
        "user": {"uid": process.uid, "gid": process.gid, "additionalGids": process.groups},
        "args": process.args,
        "env": process.env,
        "cwd": process.cwd,
        "capabilities": sets(&process.capabilities),
        "rlimits": limits.collect::<Vec<_>>(),
        "noNewPrivileges": process.no_new_privileges,
        "apparmorProfile": process.apparmor,
        "oomScoreAdj": process.oom_score_adj,
    })
}

fn sets(sets: &Capabilities) -> Value {
    let names = |set| capabilities::names(set).into_iter().map(|name| format!("CAP_{name}")).collect::<Vec<_>>();
    json!({
        "bounding": names(sets.bounding),
        "effective": names(sets.effective),
        "permitted": names(sets.permitted),
        "inheritable": names(sets.inheritable),
        "ambient": names(sets.ambient),
    })
}

fn mount(mount: &Mount) -> Value {
    let (kind, source, mut options) = match &mount.source {
        MountKind::Bind(path) => ("bind", path.display().to_string(), vec!["rbind".to_owned()]),
        MountKind::New { kind, data } => {
            let options = data.split(',').filter(|option| !option.is_empty()).map(str::to_owned).collect();
            (kind.as_str(), kind.clone(), options)
        }
        MountKind::Layers { .. } => ("overlay", "overlay".to_owned(), Vec::new()),
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
    use crate::launch::{self, fixture};

    #[test]
    fn a_plan_is_rendered_as_runtime_spec() {
        let facts = fixture::Facts::default();
        let (container, sandbox) = (fixture::container_config(), fixture::sandbox_config());
        let mut plan = launch::launch(&facts.inputs(&container, &sandbox)).expect("a plan").plan;
        plan.process.limits = vec![(7, 1024, 4096)];
        plan.process.capabilities.bounding = 1 | (1 << 21);
        let runtime_spec = spec(&plan);
        assert_eq!(runtime_spec["process"]["rlimits"], json!([{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096}]));
        assert_eq!(runtime_spec["process"]["capabilities"]["bounding"], json!(["CAP_CHOWN", "CAP_SYS_ADMIN"]));
        assert_eq!(runtime_spec["process"]["args"], json!(["/bin/true"]));
        let proc = runtime_spec["mounts"].as_array().and_then(|all| all.iter().find(|m| m["destination"] == "/proc"));
        let expected = json!({"destination": "/proc", "type": "proc", "source": "proc",
            "options": ["nosuid", "nodev", "noexec", "rw", "rprivate"]});
        assert_eq!(proc, Some(&expected));
    }
}
