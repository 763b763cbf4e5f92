//! Resolves mount sources, devices, and security profiles of a container request on the host.
//!
//! Every call may block on a dead file system: the caller runs it on the blocking pool, under a deadline that names the
//! container. This module makes no decisions: it only resolves names to facts.
//! Implements spec 09a §7.6, §7.7, §8.2, §8.4.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Once,
};

use super::{
    cdi::{self, ContainerEdits, DeviceNode, Edits},
    devices,
    inputs::{Host, LinuxDevice, MountSource, ResolvedResources},
    mounts::check_image,
    refusal::LaunchError,
    security::{self, Filter},
};
use berth_proto::cri;
use berth_sys::mount_table;

/// Maximum size of a profile or CDI file, bytes.
const LONGEST: u64 = 4 << 20;
/// Maximum depth of the walk over device directories.
const DEEPEST: usize = 8;
/// Directory names below `/dev` that belong to the host alone and are skipped.
const NOT_SHOWN: [&str; 7] = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];

/// Resolves everything that a container's request names. Creates missing source directories of mounts.
///
/// `image` resolves image volumes to their layers, after the image and the sub-path exist. The caller adds the volumes
/// of the container's image.
///
/// # Errors
/// The name that cannot be resolved, and the reason.
pub fn resolve(
    config: &cri::ContainerConfig,
    host: &Host,
    cdi_directories: &[PathBuf],
    image: &mut dyn FnMut(&cri::Mount) -> Result<MountSource, LaunchError>,
) -> Result<ResolvedResources, LaunchError> {
    let context = security::context(config);
    let mut found = ResolvedResources::default();
    let mut table = None;
    for mount in &config.mounts {
        found.places.push(match &mount.image {
            Some(_) => check_image(mount).and_then(|()| image(mount))?,
            None => place(mount, &mut table)?,
        });
    }
    for device in &config.devices {
        found.devices.extend(requested(device)?);
    }
    if context.privileged {
        found.host_devices = below_dev().map_err(|error| LaunchError::plain(format!("list host devices: {error}")))?;
    }
    if let Filter::File(path) = security::filter(&context, host.has_seccomp)? {
        let text = read(Path::new(&path));
        let text =
            text.map_err(|error| LaunchError::plain(format!("failed to load seccomp profile {path:?}: {error}")))?;
        found.profile = Some(text);
    }
    if host.has_apparmor {
        found.apparmor = loaded_profiles();
    }
    let names = cdi::names(config);
    if !names.is_empty() {
        found.edits = resolve_edits(&cdi::edits(&names, &specs(cdi_directories))?)?;
    }
    Ok(found)
}

/// Names of the loaded AppArmor profiles. Logs one warning per process if no default profile is among them.
fn loaded_profiles() -> Vec<String> {
    static WARN_ONCE: Once = Once::new();
    // Unreadable inside some containers: then no profile counts as loaded.
    let text = read(Path::new("/sys/kernel/security/apparmor/profiles")).unwrap_or_default();
    let loaded = security::apparmor_profiles(&String::from_utf8_lossy(&text));
    if security::default_apparmor(&loaded).is_none() {
        WARN_ONCE.call_once(|| tracing::warn!("Default AppArmor profile is not loaded, containers run unconfined"));
    }
    loaded
}

/// Resolves a mount source: its path without symbolic links, and the propagation of the mount that contains it.
fn place(mount: &cri::Mount, table: &mut Option<Vec<mount_table::Mount>>) -> Result<MountSource, LaunchError> {
    let asked = Path::new(&mount.host_path);
    if !asked.is_absolute() {
        let text = format!("mount of {:?} has no absolute host path: {:?}", mount.container_path, mount.host_path);
        return Err(LaunchError::invalid(text));
    }
    let path = match fs::canonicalize(asked) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(asked);
            made.map_err(|error| LaunchError::plain(format!("failed to mkdir {asked:?}: {error}")))?;
            fs::canonicalize(asked)
        }
        other => other,
    };
    let path = path.map_err(|error| LaunchError::plain(format!("failed to resolve symlink {asked:?}: {error}")))?;
    if mount.propagation() == cri::MountPropagation::PropagationPrivate {
        return Ok(MountSource::Host { path, on: PathBuf::from("/"), is_shared: false, is_slave: false });
    }
    let table = match table {
        Some(table) => table,
        None => {
            let read = mount_table::read();
            table.insert(read.map_err(|error| LaunchError::plain(format!("read mount table: {error}")))?)
        }
    };
    // Of several mounts on the same point, the last one is effective.
    let on = table.iter().filter(|m| path.starts_with(&m.target)).max_by_key(|m| m.target.components().count());
    let on = on.ok_or_else(|| LaunchError::plain(format!("{path:?} is not on any mount")))?;
    Ok(MountSource::Host { path, on: on.target.clone(), is_shared: on.is_shared, is_slave: on.is_slave })
}

/// The nodes of one requested device: a single node, or all nodes below a directory.
fn requested(asked: &cri::Device) -> Result<Vec<LinuxDevice>, LaunchError> {
    let access = devices::access(asked)?;
    let refuse = |error: io::Error| LaunchError::plain(format!("device {:?}: {error}", asked.host_path));
    let source = fs::canonicalize(&asked.host_path).map_err(refuse)?;
    let target = if asked.container_path.is_empty() { &asked.host_path } else { &asked.container_path };
    if source.is_dir() {
        let mut all = Vec::new();
        walk(&source, &source, target, &access, 0, &mut all).map_err(refuse)?;
        return Ok(all);
    }
    let node = node(&source, target, &access).map_err(refuse)?;
    let not = || refuse(io::Error::new(io::ErrorKind::InvalidInput, "not a device node"));
    node.map(|node| vec![node]).ok_or_else(not)
}

fn below_dev() -> io::Result<Vec<LinuxDevice>> {
    let mut all = Vec::new();
    let dev = Path::new("/dev");
    walk(dev, dev, "/dev", "rwm", 0, &mut all)?;
    all.retain(|node| node.path != "/dev/console");
    Ok(all)
}

fn walk(top: &Path, at: &Path, target: &str, access: &str, depth: usize, all: &mut Vec<LinuxDevice>) -> io::Result<()> {
    for entry in fs::read_dir(at)? {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let is_shown = !NOT_SHOWN.iter().any(|name| entry.file_name() == *name);
        if kind.is_dir() && is_shown && depth < DEEPEST {
            walk(top, &path, target, access, depth + 1, all)?;
        } else if !kind.is_dir() && !kind.is_symlink() {
            let relative = path.strip_prefix(top).unwrap_or(&path).display().to_string();
            match node(&path, &format!("{target}/{relative}"), access) {
                Ok(node) => all.extend(node),
                // A device can disappear during the walk.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Reads a device node; `None` where the path is not a device node or FIFO.
fn node(source: &Path, target: &str, access: &str) -> io::Result<Option<LinuxDevice>> {
    let stat = rustix::fs::lstat(source)?;
    let kind = match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
        rustix::fs::FileType::BlockDevice => 'b',
        rustix::fs::FileType::CharacterDevice => 'c',
        rustix::fs::FileType::Fifo => 'p',
        _ => return Ok(None),
    };
    let device = stat.st_rdev;
    Ok(Some(LinuxDevice {
        path: super::args::absolute(target),
        kind,
        numbers: (rustix::fs::major(device), rustix::fs::minor(device)),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        access: access.to_owned(),
    }))
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read;
    let mut text = Vec::new();
    let mut limited = fs::File::open(path)?.take(LONGEST + 1);
    limited.read_to_end(&mut text)?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > LONGEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("longer than {LONGEST} bytes")));
    }
    Ok(text)
}

/// All CDI spec files, those of later directories last. Skips an invalid file with a warning.
fn specs(directories: &[PathBuf]) -> Vec<cdi::Spec> {
    let mut all = Vec::new();
    for directory in directories {
        let Ok(entries) = fs::read_dir(directory) else { continue };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            match spec(&path) {
                Ok(spec) => all.extend(spec),
                Err(error) => tracing::warn!(path = %path.display(), %error, "Skipping invalid CDI spec file"),
            }
        }
    }
    all
}

/// One CDI spec file; `None` where the extension is neither `json` nor `yaml`.
fn spec(path: &Path) -> Result<Option<cdi::Spec>, String> {
    let is_json = match path.extension().and_then(|extension| extension.to_str()) {
        Some("json") => true,
        Some("yaml") => false,
        _ => return Ok(None),
    };
    let text = String::from_utf8(read(path).map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
    let spec = match is_json {
        true => serde_json::from_str(&text).map_err(|error| error.to_string()),
        false => serde_saphyr::from_str(&text).map_err(|error| error.to_string()),
    };
    spec.map(Some)
}

/// Merges container edits and resolves their device nodes on the host.
fn resolve_edits(all: &[ContainerEdits]) -> Result<Edits, LaunchError> {
    let mut edits = Edits::default();
    for from in all {
        edits.env.extend(from.env.iter().cloned());
        edits.groups.extend(from.additional_gids.iter().filter(|gid| **gid != 0));
        for node in &from.device_nodes {
            edits.nodes.push(edited(node)?);
        }
        for mount in &from.mounts {
            let mount = cdi::mount(mount)?;
            edits.mounts.retain(|earlier| earlier.target != mount.target);
            edits.mounts.push(mount);
        }
        for hook in &from.hooks {
            edits.hooks.push(cdi::hook(hook)?);
        }
    }
    Ok(edits)
}

fn edited(asked: &DeviceNode) -> Result<LinuxDevice, LaunchError> {
    let source = if asked.host_path.is_empty() { &asked.path } else { &asked.host_path };
    let refuse = |what: &str| LaunchError::plain(format!("invalid CDI device node {:?}: {what}", asked.path));
    let access = if asked.permissions.is_empty() { "rwm" } else { &asked.permissions };
    let node_type = match asked.kind.as_str() {
        "b" => Some('b'),
        "c" | "u" => Some('c'),
        "p" => Some('p'),
        "" => None,
        other => return Err(refuse(&format!("unknown type {other:?}"))),
    };
    let is_whole = node_type == Some('p') || asked.major.zip(asked.minor).is_some();
    let on_host = match node(Path::new(source), &asked.path, access) {
        Ok(Some(node)) => node,
        Ok(None) => return Err(refuse("host path is not a device node")),
        Err(_) if node_type.is_some() && is_whole => LinuxDevice {
            path: super::args::absolute(&asked.path),
            kind: 'c',
            numbers: (0, 0),
            mode: 0o666,
            uid: 0,
            gid: 0,
            access: access.to_owned(),
        },
        Err(error) => return Err(refuse(&error.to_string())),
    };
    Ok(LinuxDevice {
        kind: node_type.unwrap_or(on_host.kind),
        numbers: asked.major.zip(asked.minor).unwrap_or(on_host.numbers),
        mode: asked.file_mode.map_or(on_host.mode, |mode| mode & 0o7777),
        uid: asked.uid.unwrap_or(on_host.uid),
        gid: asked.gid.unwrap_or(on_host.gid),
        ..on_host
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::fixture;

    fn found(config: &cri::ContainerConfig, cdi: &[PathBuf]) -> Result<ResolvedResources, String> {
        let mut image =
            |mount: &cri::Mount| Err(LaunchError::missing(format!("no image for {}", mount.container_path)));
        resolve(config, &fixture::host(), cdi, &mut image).map_err(|refusal| refusal.text)
    }

    fn mount(host_path: &Path) -> cri::Mount {
        let host_path = host_path.to_str().expect("a name").to_owned();
        cri::Mount { container_path: "/t".to_owned(), host_path, ..Default::default() }
    }

    #[test]
    fn sources_of_mounts_are_made_and_resolved() {
        let directory = tempfile::tempdir().expect("a directory");
        let real = directory.path().canonicalize().expect("a path");
        std::os::unix::fs::symlink("missing/deep", real.join("link")).expect("a link");
        let config = cri::ContainerConfig {
            mounts: vec![mount(&real.join("missing/deep")), mount(&real.join("link"))],
            ..Default::default()
        };
        let places = found(&config, &[]).expect("facts").places;
        let path = |place: &MountSource| match place {
            MountSource::Host { path, .. } => path.clone(),
            MountSource::Image { .. } => panic!("an image"),
        };
        assert_eq!(places.iter().map(path).collect::<Vec<_>>(), [real.join("missing/deep"), real.join("missing/deep")]);
        let config = cri::ContainerConfig { mounts: vec![mount(Path::new("x"))], ..Default::default() };
        assert!(found(&config, &[]).is_err());
        let image = cri::Mount { image: Some(Default::default()), readonly: true, ..mount(Path::new("")) };
        let config = cri::ContainerConfig { mounts: vec![image], ..Default::default() };
        let text = "ImageVolumeMountFailed: image must be specified while mount image";
        assert_eq!(found(&config, &[]), Err(text.to_owned()));
    }

    #[test]
    fn propagation_is_that_of_the_mount_below() {
        let travelling = cri::Mount { propagation: 1, ..mount(Path::new("/proc/self")) };
        let config = cri::ContainerConfig { mounts: vec![travelling], ..Default::default() };
        let places = found(&config, &[]).expect("facts").places;
        assert!(matches!(places.as_slice(), [MountSource::Host { on, .. }] if on == Path::new("/proc")), "{places:?}");
    }

    #[test]
    fn devices_are_resolved_on_the_host() {
        let device = |host_path: &str, container_path: &str| cri::ContainerConfig {
            devices: vec![cri::Device {
                host_path: host_path.to_owned(),
                container_path: container_path.to_owned(),
                permissions: "r".to_owned(),
            }],
            ..Default::default()
        };
        let nodes = found(&device("/dev/null", "/dev/x"), &[]).expect("facts").devices;
        let [node] = nodes.as_slice() else { panic!("one: {nodes:?}") };
        assert_eq!((node.path.as_str(), node.kind, node.numbers, node.access.as_str()), ("/dev/x", 'c', (1, 3), "r"));
        let nodes = found(&device("/dev", "/d"), &[]).expect("facts").devices;
        assert!(nodes.iter().any(|node| node.path == "/d/zero" && node.numbers == (1, 5)));
        assert!(!nodes.iter().any(|node| node.path.starts_with("/d/pts")));
        assert_eq!(found(&device("/proc/version", ""), &[]), Err("device \"/proc/version\": not a device node".into()));
        assert!(found(&device("/dev/none", ""), &[]).is_err());
        assert!(below_dev().expect("devices").iter().any(|node| node.path == "/dev/null"));
    }

    #[test]
    fn files_of_vendors_are_read() {
        let [first, later] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let write =
            |at: &tempfile::TempDir, name: &str, text: &str| fs::write(at.path().join(name), text).expect("a file");
        write(
            &first,
            "a.yaml",
            "kind: a.b/c\ndevices:\n- name: x\n  containerEdits:\n    env: [A=1]\n    \
              additionalGids: [0, 5]\n    deviceNodes:\n    - path: /dev/null\n      permissions: rw\n      uid: 7\n",
        );
        write(&first, "b.json", "broken");
        write(&first, "c.txt", "other");
        write(
            &later,
            "a.json",
            r#"{"kind": "a.b/c", "devices": [{"name": "y", "containerEdits": {
              "deviceNodes": [{"path": "/dev/none", "type": "c", "major": 5, "minor": 6}],
              "mounts": [{"hostPath": "/h", "containerPath": "/m", "options": ["ro"]}]}}]}"#,
        );
        let config = |names: &[&str]| cri::ContainerConfig {
            cdi_devices: names.iter().map(|name| cri::CdiDevice { name: (*name).to_owned() }).collect(),
            ..Default::default()
        };
        let directories = [first.path().to_owned(), later.path().to_owned()];
        let edits = found(&config(&["a.b/c=x", "a.b/c=y"]), &directories).expect("facts").edits;
        assert_eq!((edits.env, edits.groups, edits.mounts.len()), (vec!["A=1".to_owned()], vec![5], 1));
        let [null, made] = edits.nodes.as_slice() else { panic!("two") };
        assert_eq!((null.numbers, null.uid, null.access.as_str()), ((1, 3), 7, "rw"));
        assert_eq!((made.numbers, made.kind), ((5, 6), 'c'));
        let text = "unresolvable CDI devices a.b/c=z".to_owned();
        assert_eq!(found(&config(&["a.b/c=z"]), &directories), Err(text));
    }

    #[test]
    fn profiles_of_the_host_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("p.json");
        fs::write(&path, "{}").expect("a file");
        let with = |path: &Path| {
            let mut config = cri::ContainerConfig::default();
            let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            let localhost_ref = path.to_str().expect("a name").to_owned();
            let kind = cri::security_profile::ProfileType::Localhost.into();
            context.seccomp = Some(cri::SecurityProfile { profile_type: kind, localhost_ref });
            config
        };
        assert_eq!(found(&with(&path), &[]).expect("facts").profile, Some(b"{}".to_vec()));
        let refusal = found(&with(Path::new("/none")), &[]).expect_err("a refusal");
        assert!(refusal.starts_with("failed to load seccomp profile \"/none\": "), "{refusal}");
    }
}
