//! critest's security context cases on this machine's kernel. Spec 09 §11.2, §11.3 (AC-09-E1).

use std::{fs, path::Path, time::Duration};

use berth_proto::cri;

use berth_testkit::{
    embedded::{
        fixture::in_network_namespace,
        in_process::{Daemon, container, daemon, pod},
    },
    image,
};

const ASLEEP: &str = "while :; do sleep 0.1; done";
const POD: i32 = cri::NamespaceMode::Pod as i32;
const CONTAINER: i32 = cri::NamespaceMode::Container as i32;
const NODE: i32 = cri::NamespaceMode::Node as i32;

type Context = cri::LinuxContainerSecurityContext;

fn number(value: i64) -> Option<cri::Int64Value> {
    Some(cri::Int64Value { value })
}

/// A container with a security context; its PID namespace is its own unless the context sets one.
fn confined(name: &str, context: Context) -> cri::ContainerConfig {
    let own = cri::NamespaceOption { pid: CONTAINER, ..Default::default() };
    let mut config = container(name, ASLEEP);
    let linux = config.linux.as_mut().expect("Linux");
    linux.security_context =
        Some(Context { namespace_options: context.namespace_options.clone().or(Some(own)), ..context });
    config
}

/// A pod with these namespace options.
fn pod_of(place: &Path, name: &str, options: cri::NamespaceOption) -> cri::PodSandboxConfig {
    let mut config = pod(place, name);
    let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("a context");
    context.namespace_options = Some(options);
    config
}

/// Output of a script in the container's init; asserts that an exec process has the same output.
async fn output(daemon: &Daemon, sandbox: &str, (name, context): (&str, Context), script: &str) -> String {
    let mut config = confined(name, context);
    config.command =
        ["/bin/sh", "-c", &format!("{{ {script}; }} 2>&1; echo end; {ASLEEP}")].map(str::to_owned).to_vec();
    let id = daemon.start(sandbox, config).await;
    let (executed, _) = daemon.exec(&id, &format!("{{ {script}; }} 2>&1; true")).await;
    let log = daemon.status(&id).await.log_path;
    let own = loop {
        let text = fs::read_to_string(&log).expect("a log");
        if text.ends_with(" F end\n") {
            break text;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let own: String =
        own.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).map(|line| format!("{line}\n")).collect();
    assert_eq!(own, format!("{executed}end\n"), "{name}: what is executed is as its container");
    executed
}

/// Error of creating such a container.
async fn refusal(daemon: &Daemon, sandbox: &str, (name, context): (&str, Context)) -> String {
    daemon.calls.create(sandbox, &confined(name, context)).await.expect_err(name).message().to_owned()
}

async fn import_groups(daemon: &Daemon, place: &Path) -> String {
    let name = "docker.io/library/groups:1".to_owned();
    let group = b"root:x:0:\napp:x:1000:\npredefined:x:50000:app\n".to_vec();
    let files = [("etc/group", group, 0o644)];
    let image = image::Image { files: &files, user: "1000", ..image::Image::busybox(&name) };
    let archive = place.join("groups.tar");
    image::write_archive(&[image], &archive).expect("written");
    daemon.images.import(&archive, None).await.expect("imported");
    name
}

// "bucket": users, groups; "SupplementalGroupsPolicy"
#[test]
fn a_container_runs_as_the_requested_user_and_groups() {
    in_network_namespace("a_container_runs_as_the_requested_user_and_groups", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let ids = "id -u; id -g; id -G";
        for (name, context, expected) in [
            ("user", Context { run_as_user: number(1001), ..Default::default() }, "1001\n0\n0\n"),
            ("name", Context { run_as_username: "app".to_owned(), ..Default::default() }, "1000\n1000\n1000\n"),
            (
                "group",
                Context { run_as_user: number(1001), run_as_group: number(1002), ..Default::default() },
                "1001\n1002\n1002\n",
            ),
            ("more", Context { supplemental_groups: vec![1234], ..Default::default() }, "0\n0\n0 1234\n"),
        ] {
            assert_eq!(output(&daemon, &sandbox, (name, context), ids).await, expected, "{name}");
        }
        let context = Context { run_as_group: number(1002), ..Default::default() };
        let text = refusal(&daemon, &sandbox, ("only", context)).await;
        assert!(text.contains("user group \"1002\" is specified without user"), "{text}");
        // The image's own groups count where they are merged; the status reports them.
        let image = import_groups(&daemon, place.path()).await;
        for (policy, name, expected) in [
            (cri::SupplementalGroupsPolicy::Merge, "merge", vec![1000, 1234, 50000]),
            (cri::SupplementalGroupsPolicy::Strict, "strict", vec![1000, 1234]),
        ] {
            let context = Context {
                supplemental_groups: vec![1234],
                supplemental_groups_policy: policy.into(),
                ..Context::default()
            };
            let mut config = confined(name, context);
            config.image = Some(cri::ImageSpec { image: image.clone(), ..Default::default() });
            let id = daemon.start(&sandbox, config).await;
            let words = expected.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
            assert_eq!(daemon.exec(&id, "id -G").await.0, format!("{words}\n"), "{name}");
            let user = daemon.status(&id).await.user.and_then(|user| user.linux).expect("received");
            assert_eq!((user.uid, user.gid, user.supplemental_groups), (1000, 1000, expected), "{name}");
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

/// C5: a process in the root cgroup of a hierarchy can mount it and freeze or throttle host processes.
#[test]
fn a_container_has_a_group_of_its_own_in_every_hierarchy() {
    in_network_namespace("a_container_has_a_group_of_its_own_in_every_hierarchy", async |place| {
        let daemon = daemon(place.path()).await;
        let sandbox = daemon.run(pod(place.path(), "a")).await;
        let groups = output(&daemon, &sandbox, ("c", Context::default()), "cat /proc/self/cgroup").await;
        let own = fs::read_to_string("/proc/self/cgroup").expect("readable");
        assert_eq!(groups.lines().count(), own.lines().count(), "{groups}");
        // On cgroup v2, the cgroup namespace hides the path.
        if groups.lines().count() > 1 {
            let in_root: Vec<&str> = groups.lines().filter(|line| line.ends_with(":/")).collect();
            assert!(in_root.is_empty(), "in the host's groups: {in_root:?}");
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

// "bucket": read-only root, privileged, capabilities, paths; "NoNewPrivs"
#[test]
fn a_container_has_the_privileges_of_its_security_context() {
    in_network_namespace("a_container_has_the_privileges_of_its_security_context", async |place| {
        let daemon = daemon(place.path()).await;
        let mut config = pod(place.path(), "a");
        let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("a context");
        context.privileged = true;
        let sandbox = daemon.run(config).await;
        let capability = |add: &[&str], drop: &[&str]| {
            let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let capabilities = Some(cri::Capability {
                add_capabilities: list(add),
                drop_capabilities: list(drop),
                ..Default::default()
            });
            Context { capabilities, ..Context::default() }
        };
        let effective = "grep CapEff /proc/self/status";
        for (name, context, script, expected) in [
            ("writable", Context::default(), "touch /t && echo done", "done\n"),
            (
                "readonly",
                Context { readonly_rootfs: true, ..Default::default() },
                "touch /t",
                "touch: /t: Read-only file system\n",
            ),
            ("plain", Context::default(), effective, "CapEff:\t00000000a80425fb\n"),
            ("adds", capability(&["SYS_ADMIN"], &[]), effective, "CapEff:\t00000000a82425fb\n"),
            ("drops", capability(&[], &["NET_RAW"]), effective, "CapEff:\t00000000a80405fb\n"),
            ("none", capability(&[], &["ALL"]), effective, "CapEff:\t0000000000000000\n"),
            (
                "masked",
                Context { masked_paths: vec!["/etc/passwd".to_owned(), "/www".to_owned()], ..Default::default() },
                "stat -c %F /etc/passwd; touch /www/x",
                "character special file\ntouch: /www/x: Read-only file system\n",
            ),
            (
                "protected",
                Context { readonly_paths: vec!["/tmp".to_owned()], ..Default::default() },
                "touch /tmp/x",
                "touch: /tmp/x: Read-only file system\n",
            ),
            (
                "tamed",
                Context { no_new_privs: true, run_as_user: number(1000), ..Default::default() },
                "grep NoNewPrivs /proc/self/status",
                "NoNewPrivs:\t1\n",
            ),
            (
                "wild",
                Context { run_as_user: number(1000), ..Default::default() },
                "grep NoNewPrivs /proc/self/status",
                "NoNewPrivs:\t0\n",
            ),
        ] {
            assert_eq!(output(&daemon, &sandbox, (name, context), script).await, expected, "{name}");
        }
        let host = fs::read_to_string("/proc/self/status").expect("readable");
        let host = host.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).expect("received").to_owned();
        let privileged = || Context { privileged: true, ..Context::default() };
        for (name, context) in [("all", capability(&["ALL"], &[])), ("privileged", privileged())] {
            let printed = output(&daemon, &sandbox, (name, context), effective).await;
            assert_eq!(printed, format!("CapEff:\t{host}\n"), "{name}");
        }
        // A mount needs CAP_SYS_ADMIN, which only the privileged container has.
        let script = "busybox mount -t tmpfs x /tmp >/dev/null 2>&1 && echo mounted || echo refused";
        for (name, context, expected) in
            [("may", privileged(), "mounted\n"), ("may-not", Context::default(), "refused\n")]
        {
            let id = daemon.start(&sandbox, confined(name, context)).await;
            assert_eq!(daemon.exec(&id, script).await.0, expected, "{name}");
        }
        let plain = daemon.run(pod(place.path(), "plain")).await;
        let text = refusal(&daemon, &plain, ("refused", privileged())).await;
        assert!(text.contains("no privileged container allowed in sandbox"), "{text}");
        for sandbox in [&sandbox, &plain] {
            daemon.remove(sandbox).await;
        }
        daemon.stop.cancel();
    });
}

// "SeccompProfilePath"; "AppArmor" on a host without it
#[test]
#[allow(deprecated, reason = "older clients use the old field")]
fn filters_are_those_of_the_context() {
    in_network_namespace("filters_are_those_of_the_context", async |place| {
        let daemon = daemon(place.path()).await;
        let mut config = pod(place.path(), "a");
        let context = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("a context");
        context.privileged = true;
        context.namespace_options = Some(cri::NamespaceOption { pid: CONTAINER, ..Default::default() });
        let sandbox = daemon.run(config).await;
        let profile = place.path().join("profile.json");
        let text =
            r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["sethostname"],"action":"SCMP_ACT_ERRNO"}]}"#;
        fs::write(&profile, text).expect("written");
        let of = |kind: cri::security_profile::ProfileType, path: &str| {
            Some(cri::SecurityProfile { profile_type: kind.into(), localhost_ref: path.to_owned() })
        };
        use cri::security_profile::ProfileType::{Localhost, RuntimeDefault, Unconfined};
        let admin = Some(cri::Capability { add_capabilities: vec!["SYS_ADMIN".to_owned()], ..Default::default() });
        let with = |seccomp: &Option<cri::SecurityProfile>, capabilities: &Option<cri::Capability>| Context {
            seccomp: seccomp.clone(),
            capabilities: capabilities.clone(),
            ..Context::default()
        };
        let local = of(Localhost, &profile.display().to_string());
        let (unconfined, default) = (of(Unconfined, ""), of(RuntimeDefault, ""));
        let mode = "grep '^Seccomp:' /proc/self/status";
        let rename = "hostname other 2>/dev/null && echo renamed || echo refused";
        let privileged = Context { privileged: true, seccomp: local.clone(), ..Context::default() };
        for (name, context, script, expected) in [
            ("unconfined", with(&unconfined, &None), mode, "Seccomp:\t0\n"),
            ("nil", with(&None, &None), mode, "Seccomp:\t0\n"),
            ("default", with(&default, &None), mode, "Seccomp:\t2\n"),
            ("localhost", with(&local, &None), mode, "Seccomp:\t2\n"),
            ("may", with(&unconfined, &admin), rename, "renamed\n"),
            ("blocked", with(&local, &admin), rename, "refused\n"),
            ("ignored", privileged, rename, "renamed\n"),
        ] {
            assert_eq!(output(&daemon, &sandbox, (name, context), script).await, expected, "{name}");
        }
        let missing = with(&of(Localhost, "/nowhere/profile.json"), &None);
        let text = refusal(&daemon, &sandbox, ("missing", missing)).await;
        assert!(text.contains("/nowhere/profile.json"), "{text}");
        if !Path::new("/sys/module/apparmor").exists() {
            for (name, context) in [
                ("armour", Context { apparmor: of(Localhost, "not-loaded"), ..Context::default() }),
                ("old", Context { apparmor_profile: "localhost/not-loaded".to_owned(), ..Context::default() }),
            ] {
                let text = refusal(&daemon, &sandbox, (name, context)).await;
                assert!(text.contains("apparmor is not supported"), "{name}: {text}");
            }
        }
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

// "NamespaceOption"
#[test]
fn namespaces_are_the_hosts_the_pods_or_the_containers() {
    in_network_namespace("namespaces_are_the_hosts_the_pods_or_the_containers", async |place| {
        let daemon = daemon(place.path()).await;
        let own =
            |kind: &str| fs::read_link(format!("/proc/thread-self/ns/{kind}")).expect("a link").display().to_string();
        let hosts = own("pid");
        for (name, options, is_hosts) in [
            ("pid", cri::NamespaceOption { pid: NODE, ..Default::default() }, [true, false, false]),
            ("ipc", cri::NamespaceOption { ipc: NODE, pid: CONTAINER, ..Default::default() }, [false, true, false]),
            ("net", cri::NamespaceOption { network: NODE, pid: CONTAINER, ..Default::default() }, [false, false, true]),
            ("none", cri::NamespaceOption { pid: CONTAINER, ..Default::default() }, [false, false, false]),
        ] {
            let sandbox = daemon.run(pod_of(place.path(), name, options.clone())).await;
            let context = Context { namespace_options: Some(options), ..Context::default() };
            let script = "readlink /proc/self/ns/pid; readlink /proc/self/ns/ipc; readlink /proc/self/ns/net";
            let printed = output(&daemon, &sandbox, (name, context), script).await;
            let namespaces: Vec<&str> = printed.lines().collect();
            let expected = [hosts.clone(), own("ipc"), own("net")];
            for at in 0..3 {
                assert_eq!(namespaces[at] == expected[at], is_hosts[at], "{name}: {namespaces:?}");
            }
            daemon.remove(&sandbox).await;
        }
        // In a pod with a shared PID namespace, process 1 belongs to no container.
        let shared = cri::NamespaceOption { pid: POD, ..Default::default() };
        let sandbox = daemon.run(pod_of(place.path(), "shared", shared.clone())).await;
        let context = || Context { namespace_options: Some(shared.clone()), ..Context::default() };
        let one = daemon.start(&sandbox, confined("one", context())).await;
        let two = daemon.start(&sandbox, confined("two", context())).await;
        let (first, _) = daemon.exec(&one, "cat /proc/1/cmdline").await;
        assert!(!first.contains("sh") || first.contains("shim"), "{first:?}");
        let same = "readlink /proc/self/ns/pid";
        assert_eq!(daemon.exec(&one, same).await, daemon.exec(&two, same).await);
        daemon.remove(&sandbox).await;
        let sandbox = daemon.run(pod(place.path(), "apart")).await;
        let one = daemon.start(&sandbox, confined("own", Context::default())).await;
        let (first, _) = daemon.exec(&one, "cat /proc/1/cmdline").await;
        assert!(first.starts_with("/bin/sh"), "{first:?}");
        daemon.remove(&sandbox).await;
        daemon.stop.cancel();
    });
}

fn users(mode: i32, lines: &[(u32, u32, u32)]) -> cri::UserNamespace {
    let line = |(host_id, container_id, length): &(u32, u32, u32)| cri::IdMapping {
        host_id: *host_id,
        container_id: *container_id,
        length: *length,
    };
    let lines: Vec<_> = lines.iter().map(line).collect();
    cri::UserNamespace { mode, uids: lines.clone(), gids: lines }
}

// "UserNamespaces"; and a pod with a user namespace on the host network
#[test]
fn users_are_the_pods_or_the_hosts() {
    in_network_namespace("users_are_the_pods_or_the_hosts", async |place| {
        let daemon = daemon(place.path()).await;
        let status =
            daemon.calls.rpc.clone().status(cri::StatusRequest::default()).await.expect("received").into_inner();
        let features = status.runtime_handlers.iter().find_map(|handler| handler.features).expect("received");
        let options = |users: cri::UserNamespace, network: i32| cri::NamespaceOption {
            network,
            pid: CONTAINER,
            userns_options: Some(users),
            ..Default::default()
        };
        let of_pod = users(POD, &[(200_000, 0, 65_536)]);
        let mut runs = vec![("node", users(NODE, &[]), POD, "0 0 4294967295")];
        if features.user_namespaces {
            runs.push(("pod", of_pod.clone(), POD, "0 200000 65536"));
        }
        if status.features.is_some_and(|features| features.user_namespaces_host_network) {
            runs.push(("network", of_pod.clone(), NODE, "0 200000 65536"));
        }
        for (name, asked, network, expected) in runs {
            let options = options(asked, network);
            let sandbox = daemon.run(pod_of(place.path(), name, options.clone())).await;
            let context = Context { namespace_options: Some(options), ..Context::default() };
            let script =
                "cat /proc/self/uid_map; ls /sys/class/net | grep -cx lo; touch /sys/x 2>/dev/null || echo protected";
            let printed = output(&daemon, &sandbox, (name, context), script).await;
            let words: Vec<&str> = printed.split_whitespace().collect();
            assert_eq!(words[..3].join(" "), expected, "{name}");
            assert_eq!(words[3..], ["1", "protected"], "{name}");
            daemon.remove(&sandbox).await;
        }
        for (name, wrong, text) in [
            ("two", users(POD, &[(200_000, 0, 10), (300_000, 10, 10)]), "only one mapping line supported"),
            ("not-root", users(POD, &[(200_000, 1, 10)]), "container ID 0 is not mapped"),
            ("container", users(CONTAINER, &[(200_000, 0, 10)]), "unsupported user namespace mode"),
            ("target", users(3, &[(200_000, 0, 10)]), "unsupported user namespace mode"),
        ] {
            let config = pod_of(place.path(), name, options(wrong, POD));
            let refused = daemon.calls.run(&config).await.expect_err(name);
            assert!(refused.message().contains(text), "{name}: {}", refused.message());
        }
        place.assert_clean();
        daemon.stop.cancel();
    });
}
