//! Table tests for namespaces.

use super::*;
use crate::launch::{fixture, inputs::TargetContainer};

fn options(network: i32, pid: i32, ipc: i32) -> cri::NamespaceOption {
    cri::NamespaceOption { network, pid, ipc, ..Default::default() }
}

fn sandbox(options: cri::NamespaceOption, sysctls: &[(&str, &str)]) -> cri::PodSandboxConfig {
    let mut config = fixture::sandbox_config();
    let linux = config.linux.get_or_insert_default();
    linux.security_context.get_or_insert_default().namespace_options = Some(options);
    linux.sysctls = sysctls.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    config
}

fn plan(options: cri::NamespaceOption, sysctls: &[(&str, &str)]) -> Result<NamespacePlan, String> {
    let config = sandbox(options, sysctls);
    namespaces(&config, "h", &fixture::host()).map_err(|refusal| refusal.text)
}

fn users_of(mode: i32, uids: &[(u32, u32, u32)], gids: &[(u32, u32, u32)]) -> cri::UserNamespace {
    let list = |rows: &[(u32, u32, u32)]| {
        rows.iter().map(|&(container_id, host_id, length)| cri::IdMapping { host_id, container_id, length }).collect()
    };
    cri::UserNamespace { mode, uids: list(uids), gids: list(gids) }
}

#[test]
fn modes_decide_what_is_made() {
    use Namespace::{Ipc, Network, Uts};
    for (network, pid, ipc, made, shares) in [
        (0, 0, 0, &[Network, Ipc, Uts][..], true),
        (1, 1, 1, &[Network, Ipc, Uts], false),
        (2, 2, 2, &[], false),
        (2, 1, 0, &[Ipc], false),
        (0, 2, 2, &[Network, Uts], false),
    ] {
        let got = plan(options(network, pid, ipc), &[]).expect("a plan");
        assert_eq!((&*got.made, got.shares_processes), (made, shares), "{network} {pid} {ipc}");
        let has_network = network != 2;
        assert_eq!(got.hostname, if has_network { "h" } else { "" });
        assert_eq!(got.sysctls.len(), if has_network { 2 } else { 0 });
    }
    for (network, pid, ipc, text) in [
        (3, 0, 0, "unsupported network namespace mode: \"TARGET\""),
        (0, 3, 0, "unsupported pid namespace mode: \"TARGET\""),
        (0, 0, 3, "unsupported ipc namespace mode: \"TARGET\""),
        (0, 9, 0, "unsupported pid namespace mode: 9"),
    ] {
        assert_eq!(plan(options(network, pid, ipc), &[]), Err(text.to_owned()));
    }
    let nameless = cri::PodSandboxConfig::default();
    let refusal = namespaces(&nameless, "h", &fixture::host()).expect_err("a refusal");
    assert_eq!(refusal, LaunchError::invalid("sandbox config must include metadata"));
}

#[test]
fn settings_are_only_those_of_a_pods_own() {
    for (name, network, ipc, expected) in [
        ("kernel.shm_rmid_forced", true, true, Ok("kernel/shm_rmid_forced")),
        ("kernel.msgmax", false, true, Ok("kernel/msgmax")),
        ("fs.mqueue.msg_max", true, true, Ok("fs/mqueue/msg_max")),
        ("kernel.sem", true, false, Err("sysctl \"kernel.sem\" is not allowed in the host ipc namespace")),
        ("net.core.somaxconn", true, true, Ok("net/core/somaxconn")),
        (
            "net.core.somaxconn",
            false,
            true,
            Err("sysctl \"net.core.somaxconn\" is not allowed in the host network namespace"),
        ),
        ("net/ipv4/conf/eth0.1/forwarding", true, true, Ok("net/ipv4/conf/eth0.1/forwarding")),
        ("net.ipv4.conf.eth0/1.forwarding", true, true, Ok("net/ipv4/conf/eth0.1/forwarding")),
        ("vm.swappiness", true, true, Err("sysctl \"vm.swappiness\" is not in a separate kernel namespace")),
        ("kernel.semx", true, true, Err("sysctl \"kernel.semx\" is not in a separate kernel namespace")),
        ("net.//.x", true, true, Err("sysctl \"net.//.x\" is not in a separate kernel namespace")),
        ("net..x", true, true, Err("sysctl \"net..x\" is not in a separate kernel namespace")),
        (
            "net/../kernel/core_pattern",
            true,
            true,
            Err("sysctl \"net/../kernel/core_pattern\" is not in a separate kernel namespace"),
        ),
        ("", true, true, Err("sysctl \"\" is not in a separate kernel namespace")),
    ] {
        let got = sysctl(name, network, ipc).map_err(|refusal| refusal.text);
        assert_eq!(got.as_deref().map_err(String::as_str), expected, "{name}");
    }
}

#[test]
fn defaults_of_settings_give_way() {
    let got = plan(options(0, 0, 0), &[("net.ipv4.ip_unprivileged_port_start", "1024")]).expect("a plan");
    let all: Vec<_> = got.sysctls.iter().map(|(k, v)| format!("{k}={v}")).collect();
    assert_eq!(all, ["net/ipv4/ip_unprivileged_port_start=1024", "net/ipv4/ping_group_range=0 2147483647"]);
    let mut with_users = options(0, 0, 0);
    with_users.userns_options = Some(users_of(0, &[(0, 65_536, 65_536)], &[(0, 65_536, 65_536)]));
    let got = plan(with_users, &[]).expect("a plan");
    assert_eq!(got.made.first(), Some(&Namespace::User));
    assert!(!got.sysctls.contains_key("net/ipv4/ping_group_range"));
}

#[test]
fn users_have_one_range_from_zero() {
    let full = [(0, 65_536, 65_536)];
    let map = |outside, count| IdMap { inside: 0, outside, count };
    for (asked, expected) in [
        (users_of(2, &[], &[]), Ok(None)),
        // AC-09a-X10
        (users_of(0, &full, &[(0, 7, 9)]), Ok(Some((map(65_536, 65_536), map(7, 9))))),
        (users_of(0, &full, &[]), Err("can't use user namespace mode \"POD\" without UID and GID mappings")),
        (users_of(0, &[], &[]), Err("can't use user namespace mode \"POD\" without UID and GID mappings")),
        (users_of(2, &full, &full), Err("can't use user namespace mode \"NODE\" with UID or GID mappings")),
        (users_of(1, &full, &full), Err("unsupported user namespace mode: \"CONTAINER\"")),
        (users_of(3, &full, &full), Err("unsupported user namespace mode: \"TARGET\"")),
        (users_of(8, &full, &full), Err("unsupported user namespace mode: \"8\"")),
        (users_of(0, &[(0, 1, 1), (1, 2, 1)], &full), Err("only one mapping line supported, got 2 mapping lines")),
        (users_of(0, &[(0, 1, 0)], &full), Err("invalid mapping length: 0")),
        (users_of(0, &[(0, u32::MAX, 2)], &full), Err("invalid mapping length: 2")),
        (users_of(0, &[(1, 65_536, 10)], &full), Err("container ID 0 is not mapped")),
        (users_of(0, &full, &[(1, 65_536, 10)]), Err("container ID 0 is not mapped")),
    ] {
        let got = users(Some(&asked)).map_err(|refusal| refusal.text);
        assert_eq!(got, expected.map_err(str::to_owned), "{asked:?}");
    }
    assert_eq!(users(None), Ok(None));
    let old = Host { has_user_namespaces: false, ..fixture::host() };
    let mut asked = options(0, 0, 0);
    asked.userns_options = Some(users_of(0, &full, &full));
    assert!(namespaces(&sandbox(asked, &[]), "h", &old).is_err());
}

fn sees(of_sandbox: i32, asked: i32, target: Option<TargetContainer<'_>>) -> Result<PidNamespace, String> {
    let (config, sandbox) = (fixture::container_config(), sandbox(options(0, of_sandbox, 0), &[]));
    let facts = fixture::Facts::default();
    let mut inputs = facts.inputs(&config, &sandbox);
    inputs.target = target;
    let asked = cri::NamespaceOption { pid: asked, target_id: "t".to_owned(), ..Default::default() };
    processes(&inputs, &asked).map_err(|refusal| refusal.text)
}

#[test]
fn containers_see_processes_as_asked() {
    assert_eq!(sees(0, 0, None), Ok(PidNamespace::Pod));
    assert_eq!(sees(1, 1, None), Ok(PidNamespace::Own));
    assert_eq!(sees(2, 2, None), Ok(PidNamespace::Host));
    assert_eq!(sees(1, 0, None), Ok(PidNamespace::Own));
    assert_eq!(sees(2, 0, None), Ok(PidNamespace::Host));
    assert_eq!(sees(0, 7, None), Err("unsupported pid namespace mode: 7".to_owned()));
}

#[test]
fn targets_run_in_the_same_sandbox() {
    let target = TargetContainer { id: "t", sandbox: fixture::SANDBOX, state: "CONTAINER_RUNNING", pid: Some(7) };
    assert_eq!(sees(1, 3, Some(target)), Ok(PidNamespace::Of("t".to_owned())));
    let ended = TargetContainer { state: "CONTAINER_EXITED", pid: None, ..target };
    assert_eq!(sees(1, 3, Some(ended)), Err("container \"t\" is not running - in state CONTAINER_EXITED".to_owned()));
    let other = TargetContainer { sandbox: "a", ..target };
    let text = format!("container \"t\" (sandbox a) does not belong to sandbox {}", fixture::SANDBOX);
    assert_eq!(sees(1, 3, Some(other)), Err(text));
    assert!(sees(1, 3, None).is_err());
}

#[test]
fn containers_repeat_their_sandboxs_users() {
    let full = [(0, 65_536, 65_536)];
    let with = |users: Option<cri::UserNamespace>| cri::NamespaceOption { userns_options: users, ..options(0, 0, 0) };
    let config = fixture::container_config();
    let facts = fixture::Facts::default();
    for (of_sandbox, of_container, is_fine) in [
        (None, None, true),
        (Some(users_of(2, &[], &[])), None, true),
        (Some(users_of(0, &full, &full)), Some(users_of(0, &full, &full)), true),
        (Some(users_of(0, &full, &full)), None, false),
        (None, Some(users_of(0, &full, &full)), false),
        (Some(users_of(0, &full, &full)), Some(users_of(0, &full, &[(0, 1, 65_536)])), false),
    ] {
        let sandbox = sandbox(with(of_sandbox), &[]);
        let got = processes(&facts.inputs(&config, &sandbox), &with(of_container)).map_err(|r| r.text);
        let expected = if is_fine {
            Ok(PidNamespace::Pod)
        } else {
            Err("user namespace config for sandbox is different from container".to_owned())
        };
        assert_eq!(got, expected);
    }
}
