//! CRI mounts and devices for a container's volumes. Pure. Implements spec 03a §6.3.
//!
//! Planned mounts still refer to subpaths; the preparer creates these in the volume and sets the host
//! path.

use std::path::{Component, Path, PathBuf};

use berth_proto::cri;
use berth_types::{
    api,
    expansion::{SubPathError, Variables},
};

/// A mounted volume.
#[derive(Clone, Copy, Debug)]
pub struct Volume<'a> {
    /// Path of the volume on the host; `None` for image volumes.
    pub host_path: Option<&'a Path>,
    /// The image that the runtime mounts, for image volumes.
    pub image: Option<&'a cri::ImageSpec>,
    /// Whether the volume itself is read-only.
    pub read_only: bool,
    /// Whether the agent owns the volume and it may be relabeled for SELinux.
    pub relabel: bool,
    /// Mode of directories created for subpaths.
    pub sub_path_mode: u32,
}

/// Inputs of the mounts, apart from the container.
pub struct MountInputs<'a> {
    /// Looks up the mounted volume of that name.
    pub volume: &'a dyn Fn(&str) -> Option<Volume<'a>>,
    /// The container's environment, for `subPathExpr`.
    pub env: &'a Variables<'a>,
    /// Whether the runtime handler supports recursive read-only mounts.
    pub recursive_read_only: bool,
    /// Whether SELinux is enabled on the node.
    pub selinux: bool,
    /// The ID mappings of the pod's user namespace; empty for the node's.
    pub id_mappings: &'a [cri::IdMapping],
}

/// A directory or file inside a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SubPath {
    /// Name of the volume.
    pub volume: String,
    /// Path of the volume on the host.
    pub volume_path: PathBuf,
    /// Path inside the volume: relative, without `..`.
    pub path: PathBuf,
    /// Mode of created directories.
    pub mode: u32,
    /// Index of the mount in the container's list.
    pub index: usize,
}

/// CRI mount of a container, complete except for a subpath that must be created first.
#[derive(Clone, PartialEq, Debug)]
pub struct PlannedMount {
    /// The mount, without the host path if it has a subpath.
    pub mount: cri::Mount,
    /// The subpath to create before the host path is known.
    pub sub_path: Option<SubPath>,
}

/// Why a mount cannot be planned.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MountError {
    /// The volume is not mounted.
    #[error("cannot find volume {volume:?} to mount into container {container:?}")]
    NoVolume {
        /// Name of the volume.
        volume: String,
        /// Name of the container.
        container: String,
    },
    /// The block volume is not mapped.
    #[error("cannot find volume {volume:?} to pass into container {container:?}")]
    NoBlockVolume {
        /// Name of the volume.
        volume: String,
        /// Name of the container.
        container: String,
    },
    /// `subPathExpr` is invalid, for example because of variables that are not set.
    #[error(transparent)]
    Expression(#[from] SubPathError),
    /// The path of a device is relative.
    #[error("error DevicePath `{0}` must be an absolute path")]
    DevicePath(String),
    /// The subpath is absolute.
    #[error("error SubPath `{0}` must not be an absolute path")]
    Absolute(String),
    /// The subpath contains `..`.
    #[error("unable to provision SubPath `{0}`: must not contain '..'")]
    Backsteps(String),
    /// The mount propagation is unknown.
    #[error("invalid MountPropagation mode: {0:?}")]
    Propagation(String),
    /// Recursive read-only requires `readOnly`.
    #[error(
        "failed to resolve recursive read-only mode: volume {0:?} requested recursive read-only mode, but it is not read-only"
    )]
    NotReadOnly(String),
    /// Recursive read-only requires private propagation.
    #[error(
        "failed to resolve recursive read-only mode: volume {volume:?} requested recursive read-only mode, but it is not compatible with propagation {mode:?}"
    )]
    Incompatible {
        /// Name of the volume.
        volume: String,
        /// Requested propagation.
        mode: String,
    },
    /// The runtime does not support recursive read-only mounts.
    #[error(
        "failed to resolve recursive read-only mode: volume {0:?} requested recursive read-only mode, but it is not supported by the runtime"
    )]
    Unsupported(String),
    /// The recursive read-only mode is unknown.
    #[error("failed to resolve recursive read-only mode: unknown recursive read-only mode {0:?}")]
    UnknownMode(String),
}

/// Plans the volume mounts of a container, in order.
///
/// # Errors
/// The first mount that cannot be planned.
pub fn plan(container: &api::Container, inputs: &MountInputs<'_>) -> Result<Vec<PlannedMount>, MountError> {
    let all = container.volume_mounts.iter().flatten().enumerate();
    all.map(|(index, mount)| one(container, index, mount, inputs)).collect()
}

/// Builds the devices of a container's block volumes; `device` returns the link to a volume, and
/// whether it is read-only.
///
/// # Errors
/// The first device that cannot be built.
pub fn devices(
    container: &api::Container,
    device: &dyn Fn(&str) -> Option<(PathBuf, bool)>,
) -> Result<Vec<cri::Device>, MountError> {
    let one = |wanted: &api::VolumeDevice| {
        if !wanted.device_path.starts_with('/') {
            return Err(MountError::DevicePath(wanted.device_path.clone()));
        }
        let (host_path, read_only) = device(&wanted.name).ok_or_else(|| MountError::NoBlockVolume {
            volume: wanted.name.clone(),
            container: container.name.clone(),
        })?;
        Ok(cri::Device {
            container_path: wanted.device_path.clone(),
            host_path: host_path.to_string_lossy().into_owned(),
            permissions: if read_only { "r" } else { "mrw" }.to_owned(),
        })
    };
    container.volume_devices.iter().flatten().map(one).collect()
}

fn one(
    container: &api::Container,
    index: usize,
    wanted: &api::VolumeMount,
    inputs: &MountInputs<'_>,
) -> Result<PlannedMount, MountError> {
    let volume = (inputs.volume)(&wanted.name)
        .ok_or_else(|| MountError::NoVolume { volume: wanted.name.clone(), container: container.name.clone() })?;
    let inside = sub_path(wanted, inputs.env)?;
    let (host_path, image_sub_path, sub_path) = match (volume.host_path, inside) {
        (Some(path), None) => (path.to_string_lossy().into_owned(), String::new(), None),
        (Some(volume_path), Some(path)) => {
            let (name, mode) = (wanted.name.clone(), volume.sub_path_mode);
            let sub_path = SubPath { volume: name, volume_path: volume_path.to_owned(), path, mode, index };
            (String::new(), String::new(), Some(sub_path))
        }
        // The runtime resolves the path inside the image itself.
        (None, inside) => {
            if volume.image.is_none() {
                let (volume, container) = (wanted.name.clone(), container.name.clone());
                return Err(MountError::NoVolume { volume, container });
            }
            (String::new(), inside.unwrap_or_default().to_string_lossy().into_owned(), None)
        }
    };
    let mount = cri::Mount {
        container_path: absolute(&wanted.mount_path),
        host_path,
        readonly: wanted.read_only == Some(true) || volume.read_only,
        selinux_relabel: volume.relabel && inputs.selinux,
        propagation: propagation(wanted)?.into(),
        uid_mappings: inputs.id_mappings.to_vec(),
        gid_mappings: inputs.id_mappings.to_vec(),
        recursive_read_only: recursive_read_only(wanted, inputs.recursive_read_only)?,
        image: volume.image.cloned(),
        image_sub_path,
    };
    Ok(PlannedMount { mount, sub_path })
}

/// The subpath of a mount; `None` for the whole volume.
fn sub_path(wanted: &api::VolumeMount, env: &Variables<'_>) -> Result<Option<PathBuf>, MountError> {
    let text = match wanted.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        Some(expression) => env.expand_sub_path(expression)?,
        None => wanted.sub_path.clone().unwrap_or_default(),
    };
    if text.is_empty() {
        return Ok(None);
    }
    let path = Path::new(&text);
    if path.is_absolute() {
        return Err(MountError::Absolute(text));
    }
    if path.components().any(|c| c == Component::ParentDir) {
        return Err(MountError::Backsteps(text));
    }
    // `.` alone means the whole volume, but through the subpath's own bind mount.
    Ok(Some(path.components().filter(|c| *c != Component::CurDir).collect()))
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn propagation(wanted: &api::VolumeMount) -> Result<cri::MountPropagation, MountError> {
    match wanted.mount_propagation.as_deref() {
        None | Some("None") => Ok(cri::MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(cri::MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(cri::MountPropagation::PropagationBidirectional),
        Some(other) => Err(MountError::Propagation(other.to_owned())),
    }
}

fn recursive_read_only(wanted: &api::VolumeMount, supported: bool) -> Result<bool, MountError> {
    let mode = wanted.recursive_read_only.as_deref().unwrap_or("Disabled");
    if mode == "Disabled" {
        return Ok(false);
    }
    let volume = || wanted.name.clone();
    if wanted.read_only != Some(true) {
        return Err(MountError::NotReadOnly(volume()));
    }
    if let Some(other) = wanted.mount_propagation.as_deref().filter(|p| *p != "None") {
        return Err(MountError::Incompatible { volume: volume(), mode: other.to_owned() });
    }
    match mode {
        "IfPossible" => Ok(supported),
        "Enabled" if supported => Ok(true),
        "Enabled" => Err(MountError::Unsupported(volume())),
        other => Err(MountError::UnknownMode(other.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn planned(mount: Value, supported: bool) -> Result<PlannedMount, String> {
        let mut mount = mount;
        let fields = mount.as_object_mut().expect("an object");
        fields.entry("name").or_insert("v".into());
        fields.entry("mountPath").or_insert("/data".into());
        let container: api::Container =
            serde_json::from_value(json!({"name": "c", "volumeMounts": [mount]})).expect("a container");
        let env = Variables::new([("A", "x"), ("EMPTY", "")]);
        let image = cri::ImageSpec { image: "sha256:1".into(), ..Default::default() };
        let inputs = MountInputs {
            volume: &|name| {
                let plain = Volume {
                    host_path: Some(Path::new("/host/v")),
                    image: None,
                    read_only: false,
                    relabel: true,
                    sub_path_mode: 0o770,
                };
                match name {
                    "v" => Some(plain),
                    "ro" => Some(Volume { read_only: true, ..plain }),
                    "image" => Some(Volume { host_path: None, image: Some(&image), read_only: true, ..plain }),
                    "not pulled" => Some(Volume { host_path: None, read_only: true, ..plain }),
                    _ => None,
                }
            },
            env: &env,
            recursive_read_only: supported,
            selinux: false,
            id_mappings: &[],
        };
        plan(&container, &inputs).map(|mut all| all.remove(0)).map_err(|e| e.to_string())
    }

    #[test]
    fn a_mount_takes_its_volumes_path() {
        let got = planned(json!({}), false).expect("a mount");
        let expected = cri::Mount { container_path: "/data".into(), host_path: "/host/v".into(), ..Default::default() };
        assert_eq!(got, PlannedMount { mount: expected, sub_path: None });
        assert_eq!(planned(json!({"mountPath": "data"}), false).expect("a mount").mount.container_path, "/data");
        assert!(planned(json!({"readOnly": true}), false).expect("a mount").mount.readonly);
        assert!(planned(json!({"name": "ro"}), false).expect("a mount").mount.readonly);
    }

    #[test]
    fn propagation_is_translated() {
        for (mode, expected) in [
            (json!(null), Ok(cri::MountPropagation::PropagationPrivate)),
            (json!("None"), Ok(cri::MountPropagation::PropagationPrivate)),
            (json!("HostToContainer"), Ok(cri::MountPropagation::PropagationHostToContainer)),
            (json!("Bidirectional"), Ok(cri::MountPropagation::PropagationBidirectional)),
            (json!("Odd"), Err("invalid MountPropagation mode: \"Odd\"".to_owned())),
        ] {
            assert_eq!(planned(json!({"mountPropagation": mode}), false).map(|p| p.mount.propagation()), expected);
        }
    }

    #[test]
    fn recursive_read_only_needs_support_and_a_plain_read_only_mount() {
        for (mount, supported, expected) in [
            (json!({}), true, Ok(false)),
            (json!({"recursiveReadOnly": "Disabled"}), true, Ok(false)),
            (json!({"recursiveReadOnly": "IfPossible", "readOnly": true}), false, Ok(false)),
            (json!({"recursiveReadOnly": "IfPossible", "readOnly": true}), true, Ok(true)),
            (json!({"recursiveReadOnly": "Enabled", "readOnly": true, "mountPropagation": "None"}), true, Ok(true)),
            (
                json!({"recursiveReadOnly": "Enabled", "readOnly": true}),
                false,
                Err(
                    "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not supported by the runtime",
                ),
            ),
            (
                json!({"recursiveReadOnly": "Enabled"}),
                true,
                Err(
                    "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not read-only",
                ),
            ),
            (
                json!({"recursiveReadOnly": "Enabled", "readOnly": true, "mountPropagation": "Bidirectional"}),
                true,
                Err(
                    "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not compatible with propagation \
                     \"Bidirectional\"",
                ),
            ),
            (
                json!({"recursiveReadOnly": "Odd", "readOnly": true}),
                true,
                Err("failed to resolve recursive read-only mode: unknown recursive read-only mode \"Odd\""),
            ),
        ] {
            let got = planned(mount.clone(), supported).map(|p| p.mount.recursive_read_only);
            assert_eq!(got, expected.map_err(str::to_owned), "{mount} {supported}");
        }
    }

    #[test]
    fn sub_paths_stay_in_their_volume() {
        let path = |mount| planned(mount, false).map(|p| p.sub_path.map(|s| s.path));
        assert_eq!(path(json!({"subPath": "a/./b"})), Ok(Some(PathBuf::from("a/b"))));
        assert_eq!(path(json!({"subPathExpr": "$(A)/y"})), Ok(Some(PathBuf::from("x/y"))));
        assert_eq!(path(json!({"subPath": ""})), Ok(None));
        assert_eq!(path(json!({"subPath": "/a"})), Err("error SubPath `/a` must not be an absolute path".to_owned()));
        assert_eq!(
            path(json!({"subPath": "a/../b"})),
            Err("unable to provision SubPath `a/../b`: must not contain '..'".to_owned())
        );
        assert_eq!(path(json!({"subPathExpr": "$(B)$(EMPTY)"})), Err("missing value for B, EMPTY".to_owned()));
        let got = planned(json!({"subPath": "a"}), false).expect("a mount");
        let sub = got.sub_path.expect("a sub-path");
        assert_eq!((sub.volume.as_str(), sub.mode, sub.index), ("v", 0o770, 0));
        assert_eq!((sub.volume_path.as_path(), got.mount.host_path.as_str()), (Path::new("/host/v"), ""));
    }

    #[test]
    fn images_are_mounted_by_the_runtime() {
        for (sub_path, expected) in [(json!(null), ""), (json!("a/./b"), "a/b")] {
            let got = planned(json!({"name": "image", "subPath": sub_path}), false).expect("a mount");
            assert_eq!(got.sub_path, None);
            assert_eq!((got.mount.host_path.as_str(), got.mount.readonly), ("", true));
            assert_eq!(got.mount.image.map(|image| image.image), Some("sha256:1".to_owned()));
            assert_eq!(got.mount.image_sub_path, expected);
        }
        assert!(planned(json!({"name": "image", "subPath": "../x"}), false).is_err());
    }

    #[test]
    fn volumes_that_are_not_there_are_named() {
        assert_eq!(
            planned(json!({"name": "w"}), false).unwrap_err(),
            "cannot find volume \"w\" to mount into container \"c\""
        );
        assert_eq!(
            planned(json!({"name": "not pulled"}), false).unwrap_err(),
            "cannot find volume \"not pulled\" to mount into container \"c\""
        );
        let block = api::Container {
            name: "c".into(),
            volume_devices: Some(vec![api::VolumeDevice { name: "b".into(), device_path: "/dev/x".into() }]),
            ..Default::default()
        };
        assert_eq!(
            devices(&block, &|_| None).unwrap_err().to_string(),
            "cannot find volume \"b\" to pass into container \"c\""
        );
    }

    #[test]
    fn devices_are_given_as_their_volumes_allow() {
        // AC-07-31
        let wants = |path: &str| api::Container {
            volume_devices: Some(vec![api::VolumeDevice { name: "b".into(), device_path: path.into() }]),
            ..Default::default()
        };
        for (read_only, permissions) in [(true, "r"), (false, "mrw")] {
            let known = |_: &str| Some((PathBuf::from("/link"), read_only));
            let expected = cri::Device {
                container_path: "/dev/x".into(),
                host_path: "/link".into(),
                permissions: permissions.into(),
            };
            assert_eq!(devices(&wants("/dev/x"), &known), Ok(vec![expected]));
            let error = devices(&wants("x"), &known).unwrap_err().to_string();
            assert_eq!(error, "error DevicePath `x` must be an absolute path");
        }
    }
}
