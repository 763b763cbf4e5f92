//! Command lines of `iscsiadm`, and parsers for its output. Pure. Implements spec 07 §7.8.

use std::collections::BTreeMap;

use super::names::IscsiTarget;

/// Keys of the CHAP secret for discovery.
const DISCOVERY_KEYS: [&str; 4] = [
    "discovery.sendtargets.auth.username",
    "discovery.sendtargets.auth.password",
    "discovery.sendtargets.auth.username_in",
    "discovery.sendtargets.auth.password_in",
];
/// Keys of the CHAP secret for session login.
const SESSION_KEYS: [&str; 4] = [
    "node.session.auth.username",
    "node.session.auth.password",
    "node.session.auth.username_in",
    "node.session.auth.password_in",
];
/// Exit codes of a logout or deletion with nothing to do: no session, no record.
pub const NOTHING_TO_DO: [i32; 2] = [2, 21];
/// Exit code of creating an interface that exists already.
pub const ALREADY_EXISTS: i32 = 15;

/// One `iscsiadm` call.
#[derive(Clone, PartialEq, Eq)]
pub struct Call {
    /// Arguments. Never logged: they may contain a secret.
    pub arguments: Vec<String>,
    /// Purpose, safe for logs and errors.
    pub what: String,
}

/// Omits the arguments, which may contain secrets.
impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("what", &self.what).finish_non_exhaustive()
    }
}

fn call(what: impl Into<String>, arguments: &[&str]) -> Call {
    Call { arguments: arguments.iter().map(|word| (*word).to_owned()).collect(), what: what.into() }
}

/// Shows the settings of an interface.
pub fn show_interface(interface: &str) -> Call {
    call("read iface", &["-m", "iface", "-I", interface, "-o", "show"])
}

/// Creates an interface.
pub fn new_interface(interface: &str) -> Call {
    call("create new iface", &["-m", "iface", "-I", interface, "-o", "new"])
}

/// Returns the `iscsiadm` call that deletes an iSCSI interface record.
pub fn delete_interface(interface: &str) -> Call {
    call("delete iface", &["-m", "iface", "-I", interface, "-o", "delete"])
}

/// Copies the settings of another interface to a new one, and sets its initiator name.
pub fn clone_interface(interface: &str, like: &str, initiator: &str) -> Vec<Call> {
    let mut settings = settings(like);
    settings.insert("iface.initiatorname".to_owned(), initiator.to_owned());
    let update = |(key, value): (&String, &String)| {
        let what = format!("update iface {key}");
        call(what, &["-m", "iface", "-I", interface, "-o", "update", "-n", key, "-v", value])
    };
    settings.iter().map(update).collect()
}

/// Parses the settings of an interface; omits empty ones and the name, which cannot change.
fn settings(shown: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let (key, value) = line.split_once(" = ")?;
        let (key, value) = (key.trim(), value.trim());
        let is_kept = key.starts_with("iface.") && key != "iface.iscsi_ifacename" && !value.contains("<empty>");
        (is_kept && !value.is_empty()).then(|| (key.to_owned(), value.to_owned()))
    };
    shown.lines().filter_map(line).collect()
}

/// Returns the transport of an interface, such as `tcp`.
pub fn transport(shown: &str) -> Option<String> {
    let found = shown.lines().find_map(|line| line.trim().strip_prefix("iface.transport_name = "))?.trim();
    Some(if found == "<empty>" { "tcp".to_owned() } else { found.to_owned() })
}

/// Returns the calls for discovery, in order. A failure of the first one can be ignored: the record may exist already.
pub fn discovery(target: &IscsiTarget, portal: &str, secret: &BTreeMap<String, String>) -> (Call, Vec<Call>, Call) {
    let start = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", &target.interface];
    let with = |what: String, more: &[&str]| call(what, &[&start[..], more].concat());
    let mut proofs = Vec::new();
    if target.chap.discovery {
        let method = "discovery.sendtargets.auth.authmethod";
        proofs.push(with("update discoverydb with CHAP".to_owned(), &["-o", "update", "-n", method, "-v", "CHAP"]));
        for (key, value) in keys(&DISCOVERY_KEYS, secret) {
            proofs.push(with(format!("update discoverydb key {key:?}"), &["-o", "update", "-n", key, "-v", value]));
        }
    }
    let new = with("create discoverydb".to_owned(), &["-o", "new"]);
    (new, proofs, with(format!("sendtargets to portal {portal}"), &["--discover"]))
}

/// Deletes the discovery record of a portal.
pub fn delete_discovery(target: &IscsiTarget, portal: &str) -> Call {
    let arguments = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", &target.interface, "-o", "delete"];
    call("delete discoverydb", &arguments)
}

/// Returns the settings to apply before a login.
pub fn settings_of_session(target: &IscsiTarget, portal: &str, secret: &BTreeMap<String, String>) -> Vec<Call> {
    let start = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", &target.interface];
    let set = |what: String, key: &str, value: &str| {
        call(what, &[&start[..], &["-o", "update", "-n", key, "-v", value][..]].concat())
    };
    let mut all = Vec::new();
    if target.chap.session {
        all.push(set("update node with CHAP".to_owned(), "node.session.auth.authmethod", "CHAP"));
        for (key, value) in keys(&SESSION_KEYS, secret) {
            all.push(set(format!("update node session key {key:?}"), key, value));
        }
    }
    // Only this agent scans for LUNs: automatic scans would add other LUNs.
    all.push(set("update node session scan".to_owned(), "node.session.scan", "manual"));
    all
}

fn keys<'a>(known: &[&'static str], secret: &'a BTreeMap<String, String>) -> Vec<(&'static str, &'a str)> {
    let value = |key: &&'static str| Some((*key, secret.get(*key)?.as_str()));
    known.iter().filter_map(value).filter(|(_, value)| !value.is_empty()).collect()
}

/// Logs in to a target.
pub fn login(target: &IscsiTarget, portal: &str) -> Call {
    let arguments = ["-m", "node", "-p", portal, "-T", &target.iqn, "-I", &target.interface, "--login"];
    call(format!("log in to portal {portal}"), &arguments)
}

/// Disables automatic login at boot.
pub fn manual_startup(target: &IscsiTarget, portal: &str) -> Call {
    let arguments =
        ["-m", "node", "-p", portal, "-T", &target.iqn, "-o", "update", "-n", "node.startup", "-v", "manual"];
    call("set iSCSI login mode to manual", &arguments)
}

/// Deletes the node record of a target at a portal.
pub fn delete_node(portal: &str, iqn: &str, interface: &str) -> Call {
    let arguments = ["-m", "node", "-p", portal, "-T", iqn, "-o", "delete", "-I", interface];
    call("delete node record", &arguments)
}

/// Logs out of a target.
pub fn logout(portal: &str, iqn: &str, interface: &str) -> Call {
    let arguments = ["-m", "node", "-p", portal, "-T", iqn, "--logout", "-I", interface];
    call(format!("log out of portal {portal}"), &arguments)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::names::Chap;

    fn target(chap: Chap) -> IscsiTarget {
        IscsiTarget {
            volume: "v".to_owned(),
            given_portal: "p".to_owned(),
            portals: vec!["p:3260".to_owned()],
            iqn: "iqn.x".to_owned(),
            lun: 0,
            base_interface: "default".to_owned(),
            interface: "default".to_owned(),
            initiator: None,
            kind: None,
            chap,
            secret: None,
        }
    }

    fn lines(calls: &[Call]) -> Vec<String> {
        calls.iter().map(|call| call.arguments.join(" ")).collect()
    }

    #[test]
    fn a_portal_is_asked_and_logged_in_to() {
        let target = target(Chap::default());
        let (new, proofs, ask) = discovery(&target, "p:3260", &BTreeMap::new());
        assert!(proofs.is_empty());
        assert_eq!(
            lines(&[
                new,
                ask,
                login(&target, "p:3260"),
                manual_startup(&target, "p:3260"),
                logout("p:3260", "iqn.x", "default")
            ]),
            [
                "-m discoverydb -t sendtargets -p p:3260 -I default -o new",
                "-m discoverydb -t sendtargets -p p:3260 -I default --discover",
                "-m node -p p:3260 -T iqn.x -I default --login",
                "-m node -p p:3260 -T iqn.x -o update -n node.startup -v manual",
                "-m node -p p:3260 -T iqn.x --logout -I default",
            ]
        );
        let set = settings_of_session(&target, "p:3260", &BTreeMap::new());
        assert_eq!(lines(&set), ["-m node -p p:3260 -T iqn.x -I default -o update -n node.session.scan -v manual"]);
    }

    #[test]
    fn secrets_are_given_and_never_shown() {
        let secret: BTreeMap<String, String> = [
            ("discovery.sendtargets.auth.username", "du"),
            ("discovery.sendtargets.auth.password", "dp"),
            ("node.session.auth.username", "su"),
            ("node.session.auth.password", "sp"),
            ("node.session.auth.username_in", ""),
            ("other", "x"),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        let target = target(Chap { discovery: true, session: true });
        let (_, proofs, _) = discovery(&target, "p:3260", &secret);
        let start = "-m discoverydb -t sendtargets -p p:3260 -I default -o update -n discovery.sendtargets.auth";
        assert_eq!(
            lines(&proofs),
            [
                format!("{start}.authmethod -v CHAP"),
                format!("{start}.username -v du"),
                format!("{start}.password -v dp")
            ]
        );
        let set = settings_of_session(&target, "p:3260", &secret);
        let start = "-m node -p p:3260 -T iqn.x -I default -o update -n node.session";
        assert_eq!(
            lines(&set),
            [
                format!("{start}.auth.authmethod -v CHAP"),
                format!("{start}.auth.username -v su"),
                format!("{start}.auth.password -v sp"),
                format!("{start}.scan -v manual"),
            ]
        );
        let shown = format!("{proofs:?} {set:?}");
        for value in ["du", "dp", "su", "sp"] {
            assert!(!shown.contains(&format!("\"{value}\"")), "{shown}");
        }
        assert!(set.iter().chain(&proofs).all(|call| !call.what.contains(" dp") && !call.what.contains(" sp")));
    }

    #[test]
    fn an_interface_is_copied() {
        let shown = "# BEGIN RECORD 2.0\niface.iscsi_ifacename = default\niface.net_ifacename = <empty>\n\
                     iface.transport_name = tcp\niface.mtu = 9000\nnonsense\niface.vlan_id =\n# END RECORD\n";
        assert_eq!(transport(shown).as_deref(), Some("tcp"));
        assert_eq!(transport("iface.transport_name = <empty>\n").as_deref(), Some("tcp"));
        assert_eq!(transport("iface.transport_name = bnx2i\n").as_deref(), Some("bnx2i"));
        assert_eq!(transport("nothing"), None);
        assert_eq!(
            lines(&clone_interface("p:3260:v", shown, "iqn.me")),
            [
                "-m iface -I p:3260:v -o update -n iface.initiatorname -v iqn.me",
                "-m iface -I p:3260:v -o update -n iface.mtu -v 9000",
                "-m iface -I p:3260:v -o update -n iface.transport_name -v tcp",
            ]
        );
    }
}
