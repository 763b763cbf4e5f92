//! iSCSI targets and LUNs of volumes, with their directory and device names. Pure.
//!
//! Implements spec 07 §1, §2.1, §7.8.

use std::path::{Path, PathBuf};

use crate::spec::{Mode, VolumeSpec};

/// Plugin name, which is part of paths.
pub const PLUGIN: &str = "kubernetes.io/iscsi";
/// Maximum portals of one volume that are tried; real disks have fewer paths.
const MOST_PORTALS: usize = 16;
/// Default port of a portal.
const PORT: &str = "3260";
/// Default iSCSI interface.
const INTERFACE: &str = "default";

/// Connections that authenticate with CHAP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Chap {
    /// SendTargets discovery (`chapAuthDiscovery`).
    pub discovery: bool,
    /// Session login.
    pub session: bool,
}

impl Chap {
    /// Whether a CHAP secret is needed.
    pub fn is_wanted(self) -> bool {
        self.discovery || self.session
    }
}

/// LUN of an iSCSI target, as a volume requests it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IscsiTarget {
    /// Name of the volume directory.
    pub volume: String,
    /// Portal exactly as in the volume spec: part of the volume's name.
    pub given_portal: String,
    /// All portals with their ports, without duplicates; the first is part of paths.
    pub portals: Vec<String>,
    /// Name of the target (IQN, EUI, or NAA).
    pub iqn: String,
    /// Logical unit number.
    pub lun: i32,
    /// Existing interface from the volume spec.
    pub base_interface: String,
    /// Interface in use: a volume-specific one if the volume has its own initiator name.
    pub interface: String,
    /// Initiator name from the volume spec, if any.
    pub initiator: Option<String>,
    /// File system type from the volume spec, if any.
    pub kind: Option<String>,
    /// Connections that authenticate with CHAP.
    pub chap: Chap,
    /// Namespace and name of the CHAP secret.
    pub secret: Option<(String, String)>,
}

/// Fields common to inline and persistent iSCSI sources.
struct SourceFields {
    target_portal: String,
    portals: Vec<String>,
    iqn: String,
    lun: i32,
    interface: Option<String>,
    initiator: Option<String>,
    kind: Option<String>,
    chap: Chap,
    secret: Option<(Option<String>, String)>,
}

fn source_fields(spec: &VolumeSpec) -> Option<SourceFields> {
    if let Some(source) = spec.as_inline().and_then(|volume| volume.iscsi.clone()) {
        let chap = Chap {
            discovery: source.chap_auth_discovery == Some(true),
            session: source.chap_auth_session == Some(true),
        };
        return Some(SourceFields {
            target_portal: source.target_portal,
            portals: source.portals.unwrap_or_default(),
            iqn: source.iqn,
            lun: source.lun,
            interface: source.iscsi_interface,
            initiator: source.initiator_name,
            kind: source.fs_type,
            chap,
            secret: source.secret_ref.map(|secret| (None, secret.name)),
        });
    }
    let source = spec.volume()?.iscsi.clone()?;
    let chap =
        Chap { discovery: source.chap_auth_discovery == Some(true), session: source.chap_auth_session == Some(true) };
    Some(SourceFields {
        target_portal: source.target_portal,
        portals: source.portals.unwrap_or_default(),
        iqn: source.iqn,
        lun: source.lun,
        interface: source.iscsi_interface,
        initiator: source.initiator_name,
        kind: source.fs_type,
        chap,
        secret: source.secret_ref.map(|secret| (secret.namespace, secret.name.unwrap_or_default())),
    })
}

/// Adds the default port to a portal without one; puts an IPv6 address in brackets.
fn with_port(portal: &str) -> String {
    let is_address = portal.matches(':').count() > 1 && !portal.starts_with('[');
    if is_address {
        return format!("[{portal}]:{PORT}");
    }
    if portal.contains(':') && !portal.ends_with(']') { portal.to_owned() } else { format!("{portal}:{PORT}") }
}

/// Whether the text may be part of a path and of a configuration line.
fn is_plain(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
}

impl IscsiTarget {
    /// Returns the target of a volume; the secret of an inline volume is in the pod's namespace.
    ///
    /// # Errors
    /// If the source is missing or invalid, or CHAP has no secret.
    pub fn of(spec: &VolumeSpec, namespace: &str) -> Result<Self, String> {
        let source = source_fields(spec).ok_or("spec does not reference an ISCSI volume type")?;
        let interface = source.interface.filter(|name| !name.is_empty()).unwrap_or_else(|| INTERFACE.to_owned());
        for (field, value) in
            [("targetPortal", &source.target_portal), ("iqn", &source.iqn), ("iscsiInterface", &interface)]
        {
            if !is_plain(value) {
                return Err(format!("iscsi.{field}: invalid value {value:?}: cannot be used in a path"));
            }
        }
        let mut portals: Vec<String> = Vec::new();
        for portal in
            std::iter::once(&source.target_portal).chain(source.portals.iter().filter(|portal| is_plain(portal)))
        {
            let portal = with_port(portal);
            if !portals.contains(&portal) && portals.len() < MOST_PORTALS {
                portals.push(portal);
            }
        }
        let initiator = source.initiator.filter(|name| !name.is_empty());
        let first = portals.first().cloned().unwrap_or_default();
        let own = initiator.as_ref().map(|_| format!("{first}:{}", spec.name));
        let secret = source.secret.filter(|(_, name)| !name.is_empty()).map(|(given, name)| {
            let given = given.filter(|namespace| !namespace.is_empty());
            (given.unwrap_or_else(|| namespace.to_owned()), name)
        });
        if source.chap.is_wanted() && secret.is_none() {
            return Err("CHAP enabled but secret name or namespace is empty".to_owned());
        }
        Ok(Self {
            volume: spec.name.clone(),
            given_portal: source.target_portal,
            portals,
            iqn: source.iqn,
            lun: source.lun,
            interface: own.unwrap_or_else(|| interface.clone()),
            base_interface: interface,
            initiator,
            kind: source.kind,
            chap: source.chap,
            secret,
        })
    }

    /// Returns the volume name that the attach/detach controller uses.
    pub fn name(&self) -> String {
        name(&self.given_portal, &self.iqn, self.lun)
    }

    /// Returns the directory of the mount shared by all pods of the node.
    pub fn directory(&self, root: &Path, mode: Mode) -> PathBuf {
        let portal = self.portals.first().map(String::as_str).unwrap_or_default();
        let own = format!("{portal}-{}-lun-{}", self.iqn, self.lun);
        base(root, mode).join(format!("iface-{}", self.interface)).join(own)
    }
}

/// Returns the volume name of a LUN.
pub fn name(portal: &str, iqn: &str, lun: i32) -> String {
    format!("{portal}:{iqn}:{lun}")
}

/// Returns the parent of all target directories.
pub fn base(root: &Path, mode: Mode) -> PathBuf {
    let own = root.join("plugins").join(PLUGIN);
    if mode == Mode::Block { own.join("volumeDevices") } else { own }
}

/// Target as encoded in a directory path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetDirectory {
    /// First portal, with its port.
    pub portal: String,
    /// Name of the target.
    pub iqn: String,
    /// Logical unit number.
    pub lun: i32,
    /// Interface in use.
    pub interface: String,
}

/// Parses the path of a target directory; `None` if it is not one.
pub fn parse(directory: &Path) -> Option<TargetDirectory> {
    let name = directory.file_name()?.to_str()?;
    let interface = directory.parent()?.file_name()?.to_str()?.strip_prefix("iface-")?.to_owned();
    let (rest, lun) = name.rsplit_once("-lun-")?;
    let at = ["-iqn.", "-eui.", "-naa."].iter().filter_map(|mark| rest.find(mark)).min()?;
    let (portal, iqn) = rest.split_at_checked(at)?;
    let (iqn, lun) = (iqn.strip_prefix('-')?.to_owned(), lun.parse().ok()?);
    Some(TargetDirectory { portal: portal.to_owned(), iqn, lun, interface })
}

/// Returns the directory name prefix that all LUNs of a target share.
pub fn target_prefix(directory: &Path) -> Option<&str> {
    let name = directory.file_name()?.to_str()?;
    Some(name.get(..name.rfind("-lun-")? + "-lun-".len()).unwrap_or(name))
}

/// Whether a link in `/dev/disk/by-path` belongs to a LUN through a portal.
pub fn is_path_link(link: &str, transport: &str, (portal, iqn, lun): (&str, &str, i32)) -> bool {
    let way = format!("ip-{portal}-iscsi-{iqn}-lun-{lun}");
    if transport == "tcp" {
        return link == way;
    }
    link.starts_with("pci-") && link.ends_with(&format!("-{way}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn inline(source: &Value) -> VolumeSpec {
        VolumeSpec::inline(&serde_json::from_value(json!({"name": "v", "iscsi": source})).expect("a volume"))
    }

    fn persistent(source: &Value) -> VolumeSpec {
        let volume = json!({"metadata": {"name": "pv"}, "spec": {"iscsi": source}});
        VolumeSpec::persistent(Arc::new(serde_json::from_value(volume).expect("a volume")), Arc::default(), false)
    }

    #[test]
    fn a_target_has_its_ports_and_paths() {
        for (source, portals, shared) in [
            (
                json!({"targetPortal": "10.0.0.1", "iqn": "iqn.2026-01.a:d", "lun": 3}),
                vec!["10.0.0.1:3260"],
                "iface-default/10.0.0.1:3260-iqn.2026-01.a:d-lun-3",
            ),
            (
                json!({"targetPortal": "10.0.0.1:99", "portals": ["10.0.0.2", "10.0.0.1:99", "a/b"], "iqn": "eui.1",
                    "lun": 0, "iscsiInterface": "ib0"}),
                vec!["10.0.0.1:99", "10.0.0.2:3260"],
                "iface-ib0/10.0.0.1:99-eui.1-lun-0",
            ),
            (
                json!({"targetPortal": "[fd00::1]", "portals": ["fd00::2", "[fd00::3]:7"], "iqn": "iqn.x", "lun": 0}),
                vec!["[fd00::1]:3260", "[fd00::2]:3260", "[fd00::3]:7"],
                "iface-default/[fd00::1]:3260-iqn.x-lun-0",
            ),
            (
                json!({"targetPortal": "p", "iqn": "iqn.x", "lun": 0, "initiatorName": "iqn.me"}),
                vec!["p:3260"],
                "iface-p:3260:v/p:3260-iqn.x-lun-0",
            ),
        ] {
            let target = IscsiTarget::of(&inline(&source), "n").expect("a target");
            assert_eq!(target.portals, portals);
            let top = Path::new("/k/plugins/kubernetes.io/iscsi");
            let directory = target.directory(Path::new("/k"), Mode::Filesystem);
            assert_eq!(directory, top.join(shared));
            assert_eq!(target.directory(Path::new("/k"), Mode::Block), top.join("volumeDevices").join(shared));
            let parsed = parse(&directory).expect("a path of ours");
            let TargetDirectory { portal, iqn, lun, interface } = parsed;
            assert_eq!(
                (Some(&portal), iqn, lun, interface),
                (target.portals.first(), target.iqn, target.lun, target.interface)
            );
        }
    }

    #[test]
    fn a_volume_is_called_what_the_attacher_calls_it() {
        let source = json!({"targetPortal": "10.0.0.1", "iqn": "iqn.x", "lun": 3});
        let target = IscsiTarget::of(&persistent(&source), "n").expect("a target");
        assert_eq!((target.name().as_str(), target.volume.as_str()), ("10.0.0.1:iqn.x:3", "pv"));
    }

    #[test]
    fn a_chap_secret_is_in_the_given_namespace_or_that_of_the_pod() {
        let source = |secret: Value| json!({"targetPortal": "p", "iqn": "iqn.x", "lun": 0, "chapAuthSession": true, "secretRef": secret});
        let secret = |spec: VolumeSpec| IscsiTarget::of(&spec, "n").map(|target| target.secret);
        let named = |namespace: &str| Ok(Some((namespace.to_owned(), "s".to_owned())));
        assert_eq!(secret(inline(&source(json!({"name": "s"})))), named("n"));
        assert_eq!(secret(persistent(&source(json!({"name": "s"})))), named("n"));
        assert_eq!(secret(persistent(&source(json!({"name": "s", "namespace": "m"})))), named("m"));
        let none = Err("CHAP enabled but secret name or namespace is empty".to_owned());
        assert_eq!(secret(inline(&source(Value::Null))), none);
    }

    #[test]
    fn what_cannot_be_part_of_a_path_is_refused() {
        for source in [
            json!({"targetPortal": "../../etc", "iqn": "iqn.x", "lun": 0}),
            json!({"targetPortal": "p", "iqn": "iqn.x/..", "lun": 0}),
            json!({"targetPortal": "p", "iqn": "iqn.x", "lun": 0, "iscsiInterface": "a/b"}),
            json!({"targetPortal": "", "iqn": "iqn.x", "lun": 0}),
            json!({"targetPortal": "p\nq", "iqn": "iqn.x", "lun": 0}),
        ] {
            IscsiTarget::of(&inline(&source), "n").expect_err("refused");
        }
    }

    #[test]
    fn only_our_paths_are_understood() {
        for path in ["/iface-x/p-iqn.a-lun-x", "/iface-x/p-iqn.a", "/x/p-iqn.a-lun-0", "/iface-x/p-a-lun-0", "/"] {
            assert_eq!(parse(Path::new(path)), None, "{path}");
        }
        let parsed = parse(Path::new("/iface-x/san-1.a:3260-iqn.2026-01.b:c-lun-1-lun-12")).expect("understood");
        assert_eq!(
            (parsed.portal.as_str(), parsed.iqn.as_str(), parsed.lun),
            ("san-1.a:3260", "iqn.2026-01.b:c-lun-1", 12)
        );
        assert_eq!(target_prefix(Path::new("/iface-x/p-iqn.a-lun-10")), Some("p-iqn.a-lun-"));
    }

    #[test]
    fn path_links_are_matched_by_transport() {
        let way = ("10.0.0.1:3260", "iqn.x", 1);
        for (link, transport, expected) in [
            ("ip-10.0.0.1:3260-iscsi-iqn.x-lun-1", "tcp", true),
            ("ip-10.0.0.1:3260-iscsi-iqn.x-lun-10", "tcp", false),
            ("ip-10.0.0.1:3260-iscsi-iqn.x-lun-1-part1", "tcp", false),
            ("pci-0000:04:00.0-ip-10.0.0.1:3260-iscsi-iqn.x-lun-1", "tcp", false),
            ("pci-0000:04:00.0-ip-10.0.0.1:3260-iscsi-iqn.x-lun-1", "bnx2i", true),
            ("ip-10.0.0.1:3260-iscsi-iqn.x-lun-1", "bnx2i", false),
        ] {
            assert_eq!(is_path_link(link, transport, way), expected, "{link} {transport}");
        }
    }
}
