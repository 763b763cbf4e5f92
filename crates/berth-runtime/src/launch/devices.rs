//! Device nodes and device cgroup rules of a container. Pure.
//! Implements spec 09a §8.1, §8.4, §7.2.

use serde::{Deserialize, Serialize};

use super::{inputs::LinuxDevice, refusal::LaunchError};
use berth_proto::cri;
use berth_shim::plan::Device;

/// Device nodes of every container: path, major and minor number. All are character devices with mode 0666.
const USUAL: [(&str, (u32, u32)); 6] = [
    ("/dev/null", (1, 3)),
    ("/dev/zero", (1, 5)),
    ("/dev/full", (1, 7)),
    ("/dev/random", (1, 8)),
    ("/dev/urandom", (1, 9)),
    ("/dev/tty", (5, 0)),
];

/// Default access rules, after a rule that denies everything: type, major, minor, access.
const ALLOWED: [(char, Option<u32>, Option<u32>, &str); 10] = [
    ('c', None, None, "m"),
    ('b', None, None, "m"),
    ('c', Some(1), Some(3), "rwm"),
    ('c', Some(1), Some(5), "rwm"),
    ('c', Some(1), Some(7), "rwm"),
    ('c', Some(1), Some(8), "rwm"),
    ('c', Some(1), Some(9), "rwm"),
    ('c', Some(5), Some(0), "rwm"),
    ('c', Some(5), Some(2), "rwm"),
    ('c', Some(136), None, "rwm"),
];

/// A device cgroup rule; a later rule overrides an earlier one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rule {
    /// Allows access if true, denies it otherwise.
    pub is_allowed: bool,
    /// Device type: `b`, `c`, or `a` for all devices.
    pub kind: char,
    /// Major number; `None`: any.
    pub major: Option<u32>,
    /// Minor number; `None`: any.
    pub minor: Option<u32>,
    /// Access: a subset of `r`, `w`, and `m`.
    pub access: String,
}

impl Rule {
    fn all(is_allowed: bool) -> Self {
        Self { is_allowed, kind: 'a', major: None, minor: None, access: "rwm".to_owned() }
    }

    /// The file of the cgroup v1 `devices` controller and the line to write to it.
    pub fn line(&self) -> (&'static str, String) {
        let file = if self.is_allowed { "devices.allow" } else { "devices.deny" };
        if self.kind == 'a' {
            return (file, "a".to_owned());
        }
        let number = |n: Option<u32>| n.map_or_else(|| "*".to_owned(), |n| n.to_string());
        (file, format!("{} {}:{} {}", self.kind, number(self.major), number(self.minor), self.access))
    }
}

/// Inputs for the devices of a container.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInputs<'a> {
    /// Nodes of the request's devices and of CDI devices.
    pub nodes: &'a [LinuxDevice],
    /// All nodes of the host, for privileged containers.
    pub host: Option<&'a [LinuxDevice]>,
    /// User and group that own the request's devices; `None`: the owner on the host.
    pub owner: Option<(u32, u32)>,
    /// Whether the container has its own `/dev`; without it no nodes are created.
    pub has_own_dev: bool,
    /// Whether the container has a terminal.
    pub terminal: bool,
}

/// The device nodes to create; a later node replaces an earlier one with the same path.
pub fn devices(wanted: &DeviceInputs<'_>) -> Vec<Device> {
    if !wanted.has_own_dev {
        return Vec::new();
    }
    let mut all: Vec<Device> = Vec::new();
    let mut add = |device: Device| match all.iter_mut().find(|earlier| earlier.path == device.path) {
        Some(earlier) => *earlier = device,
        None => all.push(device),
    };
    for (path, numbers) in USUAL {
        add(Device { path: path.to_owned(), kind: 'c', numbers, mode: 0o666, uid: 0, gid: 0 });
    }
    wanted.host.unwrap_or_default().iter().for_each(|node| add(device(node, None)));
    wanted.nodes.iter().for_each(|node| add(device(node, wanted.owner)));
    all
}

fn device(node: &LinuxDevice, owner: Option<(u32, u32)>) -> Device {
    let (uid, gid) = owner.unwrap_or((node.uid, node.gid));
    Device { path: node.path.clone(), kind: node.kind, numbers: node.numbers, mode: node.mode, uid, gid }
}

/// The device cgroup rules of a container; the first rule denies or allows everything.
pub fn rules(wanted: &DeviceInputs<'_>) -> Vec<Rule> {
    if wanted.host.is_some() {
        return vec![Rule::all(true)];
    }
    let usual = ALLOWED.iter().map(|&(kind, major, minor, access)| Rule {
        is_allowed: true,
        kind,
        major,
        minor,
        access: access.to_owned(),
    });
    let mut all: Vec<Rule> = std::iter::once(Rule::all(false)).chain(usual).collect();
    let rule = |kind, (major, minor), access: &str| Rule {
        is_allowed: true,
        kind,
        major: Some(major),
        minor: Some(minor),
        access: access.to_owned(),
    };
    all.extend(wanted.terminal.then(|| rule('c', (5, 1), "rwm")));
    let nodes = wanted.nodes.iter().filter(|node| node.kind != 'p');
    all.extend(nodes.map(|node| rule(node.kind, node.numbers, &node.access)));
    all
}

/// The access that a requested device specifies; empty means `rwm`.
///
/// # Errors
/// The permissions contain a letter other than `r`, `w`, and `m`.
pub fn access(asked: &cri::Device) -> Result<String, LaunchError> {
    match asked.permissions.as_str() {
        "" => Ok("rwm".to_owned()),
        text if text.chars().all(|c| "rwm".contains(c)) => Ok(text.to_owned()),
        text => Err(LaunchError::invalid(format!("invalid permissions {text:?} of device {:?}", asked.host_path))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, numbers: (u32, u32)) -> LinuxDevice {
        LinuxDevice { path: path.into(), kind: 'b', numbers, mode: 0o600, uid: 3, gid: 4, access: "r".into() }
    }

    fn plain(nodes: &[LinuxDevice]) -> DeviceInputs<'_> {
        DeviceInputs { nodes, host: None, owner: None, has_own_dev: true, terminal: false }
    }

    fn lines(wanted: &DeviceInputs<'_>) -> Vec<String> {
        rules(wanted).iter().map(|rule| format!("{} {}", rule.line().0, rule.line().1)).collect()
    }

    #[test]
    fn everybody_has_the_usual_devices() {
        let made = devices(&plain(&[]));
        assert_eq!(made.iter().map(|d| d.path.as_str()).collect::<Vec<_>>(), USUAL.map(|(path, _)| path));
        let nodes = [node("/dev/null", (7, 1)), node("/dev/sda", (8, 0))];
        let made = devices(&plain(&nodes));
        assert_eq!((made.len(), made.first().map(|d| d.numbers)), (7, Some((7, 1))));
        let owned = DeviceInputs { owner: Some((1000, 2000)), ..plain(&nodes) };
        let last = devices(&owned).pop().expect("a device");
        assert_eq!((last.uid, last.gid, last.mode), (1000, 2000, 0o600));
    }

    #[test]
    fn nothing_is_made_in_the_hosts_dev() {
        assert_eq!(devices(&DeviceInputs { has_own_dev: false, ..plain(&[node("/dev/sda", (8, 0))]) }), vec![]);
    }

    #[test]
    fn rules_forbid_all_and_allow_some() {
        let nodes = [node("/dev/sda", (8, 0)), LinuxDevice { kind: 'p', ..node("/dev/pipe", (0, 0)) }];
        assert_eq!(
            lines(&DeviceInputs { terminal: true, ..plain(&nodes) }),
            [
                "devices.deny a",
                "devices.allow c *:* m",
                "devices.allow b *:* m",
                "devices.allow c 1:3 rwm",
                "devices.allow c 1:5 rwm",
                "devices.allow c 1:7 rwm",
                "devices.allow c 1:8 rwm",
                "devices.allow c 1:9 rwm",
                "devices.allow c 5:0 rwm",
                "devices.allow c 5:2 rwm",
                "devices.allow c 136:* rwm",
                "devices.allow c 5:1 rwm",
                "devices.allow b 8:0 r"
            ]
        );
        assert_eq!(lines(&DeviceInputs { host: Some(&[]), ..plain(&nodes) }), ["devices.allow a"]);
    }

    #[test]
    fn permissions_are_letters() {
        for (text, expected) in [("", Some("rwm")), ("r", Some("r")), ("mr", Some("mr")), ("rx", None)] {
            let asked = cri::Device { permissions: text.to_owned(), ..Default::default() };
            assert_eq!(access(&asked).ok().as_deref(), expected, "{text}");
        }
    }
}
