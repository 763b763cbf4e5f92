//! CDI (Container Device Interface) specs: device lookup, container edits, and hooks. Pure.
//! Implements spec 09a §8.4.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{args::absolute, inputs::LinuxDevice, refusal::LaunchError};
use berth_proto::cri;
use berth_shim::plan::{self, Access, HookPoint, Mount, MountKind, Propagation};

/// Prefix of the annotation keys whose values list CDI devices.
const ANNOTATION: &str = "cdi.k8s.io/";

/// Merged container edits of all CDI devices of a container, with device nodes resolved on the host.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Edits {
    /// Environment variables as `KEY=value`.
    pub env: Vec<String>,
    /// Device nodes.
    pub nodes: Vec<LinuxDevice>,
    /// Mounts; a later mount replaces an earlier one with the same target.
    pub mounts: Vec<Mount>,
    /// Additional group ids of the container's processes.
    pub groups: Vec<u32>,
    /// OCI hooks, in the order of the devices.
    pub hooks: Vec<plan::Hook>,
}

/// One CDI spec file.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// Device kind as `vendor.com/class`.
    pub kind: String,
    /// Edits that apply once to each container that uses at least one device of this file.
    #[serde(default)]
    container_edits: ContainerEdits,
    #[serde(default)]
    devices: Vec<NamedDevice>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NamedDevice {
    name: String,
    #[serde(default)]
    container_edits: ContainerEdits,
}

/// `containerEdits` of a CDI spec or of one of its devices.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// Environment variables as `KEY=value`.
    pub env: Vec<String>,
    /// Devices to create in the container and to permit in its device cgroup.
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts to add to the container; of several at one target the last one counts.
    pub mounts: Vec<MountEdit>,
    /// OCI hooks.
    pub hooks: Vec<Hook>,
    /// Additional group ids.
    #[serde(rename = "additionalGids")]
    pub additional_gids: Vec<u32>,
}

/// A device node; absent fields take the values of the host's node.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the host; empty: same as `path`.
    pub host_path: String,
    /// Node type: `b`, `c`, `u`, `p`; empty: as on the host.
    #[serde(rename = "type")]
    pub kind: String,
    /// Major number; used only together with `minor`.
    pub major: Option<u32>,
    /// Minor number; used only together with `major`.
    pub minor: Option<u32>,
    /// Permission bits of the node.
    pub file_mode: Option<u32>,
    /// Cgroup device access, a subset of `rwm`; empty: `rwm`.
    pub permissions: String,
    /// Owner's user id.
    pub uid: Option<u32>,
    /// Owner's group id.
    pub gid: Option<u32>,
}

/// A mount entry of `containerEdits`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MountEdit {
    /// Source path on the host.
    pub host_path: String,
    /// Target path in the container, absolute.
    pub container_path: String,
    /// Mount options as `mount(8)` spells them.
    pub options: Vec<String>,
    /// File system type; empty, `bind`, or `none`: a bind mount.
    #[serde(rename = "type")]
    pub kind: String,
}

/// An OCI hook entry of `containerEdits`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hook {
    /// Lifecycle point, such as `createRuntime`.
    pub hook_name: String,
    /// Absolute path of the program.
    pub path: String,
    /// Arguments, including argument zero.
    pub args: Vec<String>,
    /// Environment variables as `KEY=value`.
    pub env: Vec<String>,
    /// Timeout in seconds; 0 or `None`: limited only by the timeout of the start.
    pub timeout: Option<i64>,
}

/// The fully qualified CDI device names of a request, without duplicates: those of `cdi_devices` first, then those of
/// the annotations in key order.
pub fn names(config: &cri::ContainerConfig) -> Vec<String> {
    let annotations: BTreeMap<&String, &String> =
        config.annotations.iter().filter(|(key, _)| key.starts_with(ANNOTATION)).collect();
    let listed = config.cdi_devices.iter().map(|device| device.name.as_str());
    let mut all: Vec<String> = Vec::new();
    for name in listed.chain(annotations.values().flat_map(|value| value.split(','))) {
        if !name.is_empty() && !all.iter().any(|known| known == name) {
            all.push(name.to_owned());
        }
    }
    all
}

/// The edits of the named devices, in the order of the names. A device of a later spec file overrides one with the same
/// name of an earlier file.
///
/// # Errors
/// No spec file defines one of the devices.
pub fn edits(names: &[String], specs: &[Spec]) -> Result<Vec<ContainerEdits>, LaunchError> {
    let mut all = Vec::new();
    let mut unknown = Vec::new();
    let mut used: Vec<*const Spec> = Vec::new();
    for name in names {
        let Some((spec, device)) = find(name, specs) else {
            unknown.push(name.as_str());
            continue;
        };
        if !used.contains(&std::ptr::from_ref(spec)) {
            used.push(std::ptr::from_ref(spec));
            all.push(spec.container_edits.clone());
        }
        all.push(device.container_edits.clone());
    }
    if !unknown.is_empty() {
        return Err(LaunchError::plain(format!("unresolvable CDI devices {}", unknown.join(", "))));
    }
    Ok(all)
}

/// Converts a CDI hook to the launch plan's form.
///
/// # Errors
/// The hook name is unknown, the path is not absolute, a variable has no name, or a string contains a NUL.
pub fn hook(edit: &Hook) -> Result<plan::Hook, LaunchError> {
    let refuse = |what: &str| LaunchError::plain(format!("invalid CDI hook {:?}: {what}", edit.hook_name));
    let moment = HookPoint::ALL.into_iter().find(|moment| moment.name() == edit.hook_name);
    let moment = moment.ok_or_else(|| refuse("unknown hook name"))?;
    if !edit.path.starts_with('/') {
        return Err(refuse("path must be absolute"));
    }
    if edit.env.iter().any(|pair| pair.find('=').is_none_or(|at| at == 0)) {
        return Err(refuse("environment variable without a name"));
    }
    if [&edit.path].into_iter().chain(&edit.args).chain(&edit.env).any(|text| text.contains('\0')) {
        return Err(refuse("an argument contains a NUL byte"));
    }
    let limit = edit.timeout.and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
    Ok(plan::Hook {
        moment,
        path: edit.path.clone().into(),
        args: edit.args.clone(),
        env: edit.env.clone(),
        limit_ms: limit.map(|seconds| seconds.saturating_mul(1000)),
    })
}

fn find<'a>(name: &str, specs: &'a [Spec]) -> Option<(&'a Spec, &'a NamedDevice)> {
    let (kind, device) = name.split_once('=')?;
    let of_kind = specs.iter().rev().filter(|spec| spec.kind == kind);
    of_kind.filter_map(|spec| Some((spec, spec.devices.iter().find(|d| d.name == device)?))).next()
}

/// Converts a CDI mount to the launch plan's form.
///
/// # Errors
/// The host path is empty, the container path is not absolute, or a bind mount has an unknown option.
pub fn mount(edit: &MountEdit) -> Result<Mount, LaunchError> {
    let refuse = |what: &str| LaunchError::plain(format!("invalid CDI mount {:?}: {what}", edit.container_path));
    if !edit.container_path.starts_with('/') || edit.host_path.is_empty() {
        return Err(refuse("host path and absolute container path are required"));
    }
    let is_bind = edit.kind.is_empty() || edit.kind == "bind" || edit.kind == "none";
    let (mut access, mut propagation, mut flags, mut data) = (Access::ReadWrite, Propagation::Private, 0, Vec::new());
    for option in &edit.options {
        match option.as_str() {
            "ro" => access = Access::ReadOnly,
            "rro" => access = Access::RecursivelyReadOnly,
            "rw" | "bind" | "rbind" | "suid" | "dev" | "exec" | "private" | "rprivate" | "relatime" => {}
            "slave" | "rslave" => propagation = Propagation::Slave,
            "shared" | "rshared" => propagation = Propagation::Shared,
            "nosuid" => flags |= 1 << 1,
            "nodev" => flags |= 1 << 2,
            "noexec" => flags |= 1 << 3,
            "noatime" => flags |= 1 << 10,
            other if is_bind => return Err(refuse(&format!("unknown option {other:?}"))),
            other => data.push(other),
        }
    }
    let source = match is_bind {
        true => MountKind::Bind(edit.host_path.clone().into()),
        false => MountKind::New { kind: edit.kind.clone(), data: data.join(",") },
    };
    Ok(Mount { target: absolute(&edit.container_path), source, access, propagation, flags, ids: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = r#"{"cdiVersion": "0.6.0", "kind": "acme.com/gpu",
        "containerEdits": {"env": ["ALL=1"]},
        "devices": [
            {"name": "0", "containerEdits": {"env": ["N=0"], "deviceNodes": [{"path": "/dev/acme0", "type": "c"}]}},
            {"name": "1", "containerEdits": {"env": ["N=1"]}},
            {"name": "hooked", "containerEdits": {"hooks": [{"hookName": "poststop", "path": "/x",
                "args": ["x", "y"], "env": ["A="], "timeout": 3}]}},
            {"name": "odd", "containerEdits": {"hooks": [{"hookName": "never", "path": "/x"}]}}]}"#;
    const LATER: &str = r#"{"kind": "acme.com/gpu", "devices": [{"name": "1", "containerEdits": {"env": ["N=one"]}}]}"#;

    fn specs() -> Vec<Spec> {
        [FIRST, LATER].map(|text| serde_json::from_str(text).expect("a spec")).into()
    }

    fn env(names: &[&str]) -> Result<Vec<String>, String> {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let all = edits(&names, &specs()).map_err(|refusal| refusal.text)?;
        Ok(all.into_iter().flat_map(|edits| edits.env).collect())
    }

    #[test]
    fn later_files_win_and_a_files_own_edits_come_once() {
        assert_eq!(env(&[]), Ok(vec![]));
        assert_eq!(env(&["acme.com/gpu=0", "acme.com/gpu=1"]), Ok(vec!["ALL=1".into(), "N=0".into(), "N=one".into()]));
        let unknown = env(&["acme.com/gpu=7", "acme.com/gpu=0", "b/c=1"]);
        assert_eq!(unknown, Err("unresolvable CDI devices acme.com/gpu=7, b/c=1".to_owned()));
    }

    #[test]
    fn hooks_are_what_can_be_executed() {
        let spec = specs().swap_remove(0);
        let named = |name: &str| {
            let device = spec.devices.iter().find(|device| device.name == name).expect("a device");
            hook(&device.container_edits.hooks[0]).map_err(|refusal| refusal.text)
        };
        let hooked = plan::Hook {
            moment: HookPoint::Poststop,
            path: "/x".into(),
            args: vec!["x".into(), "y".into()],
            env: vec!["A=".into()],
            limit_ms: Some(3000),
        };
        assert_eq!(named("hooked"), Ok(hooked));
        assert_eq!(named("odd"), Err("invalid CDI hook \"never\": unknown hook name".to_owned()));
        for moment in HookPoint::ALL {
            let plain = Hook { hook_name: moment.name().into(), path: "/x".into(), ..Hook::default() };
            assert_eq!(hook(&plain).map(|hook| (hook.moment, hook.limit_ms)), Ok((moment, None)));
            let edited = |change: fn(&mut Hook)| {
                let mut edited = plain.clone();
                change(&mut edited);
                hook(&edited).expect_err("no hook").text
            };
            for (text, what) in [
                (edited(|hook| hook.path = "x".into()), "path must be absolute"),
                (edited(|hook| hook.env = vec!["A".into()]), "environment variable without a name"),
                (edited(|hook| hook.env = vec!["=A".into()]), "environment variable without a name"),
                (edited(|hook| hook.args = vec!["a\0".into()]), "an argument contains a NUL byte"),
            ] {
                assert_eq!(text, format!("invalid CDI hook {:?}: {what}", moment.name()));
            }
        }
    }

    #[test]
    fn names_come_from_the_list_and_from_annotations() {
        let config = cri::ContainerConfig {
            cdi_devices: vec![cri::CdiDevice { name: "b=1".into() }, cri::CdiDevice { name: "a=1".into() }],
            annotations: [("cdi.k8s.io/z".into(), "a=1,c=1".into()), ("other".into(), "d=1".into())].into(),
            ..Default::default()
        };
        assert_eq!(names(&config), ["b=1", "a=1", "c=1"]);
    }

    #[test]
    fn options_of_mounts_are_understood() {
        let edit = |options: &[&str], kind: &str| MountEdit {
            host_path: "/h".into(),
            container_path: "/c".into(),
            options: options.iter().map(|o| (*o).to_owned()).collect(),
            kind: kind.into(),
        };
        let got = mount(&edit(&["ro", "nosuid", "nodev", "bind"], "")).expect("a mount");
        assert_eq!((got.access, got.flags, got.source), (Access::ReadOnly, 6, MountKind::Bind("/h".into())));
        let got = mount(&edit(&["size=1m", "noexec"], "tmpfs")).expect("a mount");
        assert_eq!((got.flags, got.source), (8, MountKind::New { kind: "tmpfs".into(), data: "size=1m".into() }));
        assert!(mount(&edit(&["fancy"], "")).is_err());
        assert!(mount(&MountEdit { container_path: "c".into(), ..edit(&[], "") }).is_err());
    }
}
