//! CNI plugin networks: scripted plugins, and Debian's.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use berth_runtime::network::{Mode, NetworkManager, NetworkSettings, TransportProtocol};
use serde_json::{Value, json};

use super::machine::*;

/// A plugin that records its calls, and acts as its configuration's `does` requests.
const SCRIPT: &str = r#"#!/bin/sh
input=$(cat)
here=$(dirname "$0")
echo "$CNI_COMMAND $(basename "$0") $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS" >> "$here/calls"
echo "$input" >> "$here/inputs"
case "$CNI_COMMAND $input" in
ADD*hangs*) sleep 1000 & wait ;;
DEL*refuses*) echo '{"cniVersion":"1.0.0","code":5,"msg":"not now"}'; exit 1 ;;
ADD*busy*) [ -e "$here/tried" ] || { touch "$here/tried"; echo '{"code":11,"msg":"try again"}'; exit 1; } ;;
ADD*broken*) echo "went wrong" >&2; exit 3 ;;
ADD*empty*) echo '{"cniVersion":"1.0.0"}'; exit ;;
STATUS*unready*) echo '{"code":50,"msg":"no uplink"}'; exit 1 ;;
esac
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"x"}],"ips":[{"address":"fd00::7/64","interface":0},{"address":"10.7.0.7/24","interface":0}]}'
"#;

struct Plugins {
    directory: PathBuf,
    settings: NetworkSettings,
}

impl Plugins {
    fn new(machine: &TestMachine) -> Self {
        let directory = machine.dir.path().join("bin");
        for name in ["one", "two"] {
            script(&directory.join(name), SCRIPT);
        }
        let mut settings = machine.settings();
        settings.cni_programs = vec![directory.clone()];
        Self { directory, settings }
    }

    fn configure(&self, file: &str, config: &Value) {
        fs::create_dir_all(&self.settings.cni_directory).expect("creatable");
        fs::write(self.settings.cni_directory.join(file), config.to_string()).expect("writable");
    }

    async fn open(&self) -> NetworkManager {
        let network = NetworkManager::open(self.settings.clone()).await.expect("settings");
        network.recover(&[]).await.expect("recovered");
        network
    }

    /// Recorded calls: verb and plugin.
    fn calls(&self) -> Vec<String> {
        let lines = fs::read_to_string(self.directory.join("calls")).unwrap_or_default();
        lines.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
    }

    fn inputs(&self) -> Vec<Value> {
        let lines = fs::read_to_string(self.directory.join("inputs")).unwrap_or_default();
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }
}

fn list(plugins: &Value) -> Value {
    json!({"name": "net", "cniVersion": "1.0.0", "plugins": plugins})
}

#[test]
fn plugins_are_called_in_order_and_back() {
    on_a_machine("plugins_are_called_in_order_and_back", async |machine| {
        let plugins = Plugins::new(&machine);
        plugins.configure(
            "10-net.conflist",
            &list(&json!([{"type": "one", "capabilities": {"portMappings": true}}, {"type": "two"}])),
        );
        let network = plugins.open().await;
        assert_eq!((network.mode(), network.status().await), (Mode::Cni, Ok(())));
        assert!(!links().contains(&"berth0".to_owned()), "nobody needs it");
        let mut pod = pod(1);
        pod.ports = vec![port(TransportProtocol::Tcp, 80, 8080)];
        let attached = network.setup(&pod).await.expect("a network");
        assert_eq!((attached.mode, &attached.ips), (Mode::Cni, &vec![address("10.7.0.7"), address("fd00::7")]));
        assert_eq!(attached.result["cniVersion"], "1.0.0");
        pod.attached = Some(attached);
        // AC-09b-N8: teardown uses the cached configuration.
        fs::remove_dir_all(&plugins.settings.cni_directory).expect("removable");
        network.teardown(&pod).await.expect("taken down");
        assert_eq!(plugins.calls(), ["ADD one", "ADD two", "DEL two", "DEL one"]);
        let inputs = plugins.inputs();
        assert_eq!(inputs[0]["runtimeConfig"]["portMappings"][0]["hostPort"], 80);
        assert_eq!(
            (&inputs[1]["runtimeConfig"], &inputs[1]["prevResult"]["ips"][0]["address"]),
            (&Value::Null, &json!("fd00::7/64"))
        );
        assert!(inputs[3]["prevResult"].is_object());
        let calls = fs::read_to_string(plugins.directory.join("calls")).expect("calls");
        let file = network.namespace_file(&pod.id);
        let args = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod-1;K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID=uid-1",
            pod.id
        );
        assert_eq!(calls.lines().next().expect("a call"), format!("ADD one {} {} eth0 {args}", pod.id, file.display()));
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn failures_are_reported_and_cleaned_up() {
    on_a_machine("failures_are_reported_and_cleaned_up", async |machine| {
        let mut plugins = Plugins::new(&machine);
        plugins.settings.cni_limit = Duration::from_millis(500);
        let cases: [(&str, &str); 4] = [
            ("hangs", "plugin type=\"two\" failed (add): timed out after 500ms"), // AC-09b-N9
            ("broken", "plugin type=\"two\" failed (add): went wrong"),
            ("empty", "failed to find network info for sandbox"),
            ("missing", "failed to find plugin \"three\" in path ["),
        ];
        for (number, (does, text)) in cases.into_iter().enumerate() {
            let kind = if does == "missing" { "three" } else { "two" };
            plugins.configure("10-net.conflist", &list(&json!([{"type": "one"}, {"type": kind, "does": does}])));
            let network = plugins.open().await;
            let pod = pod(number);
            let begun = Instant::now();
            let refused = network.setup(&pod).await.expect_err("refused").to_string();
            assert!(refused.starts_with(text), "{does}: {refused}");
            assert!(begun.elapsed() < LIMIT, "{does}: {:?}", begun.elapsed());
            assert!(!network.namespace_file(&pod.id).exists());
            if does != "missing" {
                assert!(plugins.calls().ends_with(&["DEL two".to_owned(), "DEL one".to_owned()]), "{does}");
                assert_eq!(machine.left(), Vec::<String>::new(), "{does}");
            }
        }
        let processes =
            std::process::Command::new("pgrep").args(["-f", plugins.directory.to_str().expect("text")]).output();
        assert_eq!(processes.map(|o| o.stdout).unwrap_or_default(), b"", "the one that hung is gone");
    });
}

#[test]
fn what_may_pass_is_tried_again() {
    on_a_machine("what_may_pass_is_tried_again", async |machine| {
        let plugins = Plugins::new(&machine);
        plugins.configure("10-net.conf", &json!({"name": "net", "cniVersion": "0.4.0", "type": "one", "does": "busy"}));
        let network = plugins.open().await;
        network.setup(&pod(1)).await.expect("a network");
        assert_eq!(plugins.calls(), ["ADD one", "ADD one"]);
        network.teardown(&pod(1)).await.expect("taken down without what was attached");
        assert_eq!(plugins.calls().len(), 3);
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn a_pod_that_cannot_be_removed_stays() {
    on_a_machine("a_pod_that_cannot_be_removed_stays", async |machine| {
        let plugins = Plugins::new(&machine);
        plugins.configure("10-net.conflist", &list(&json!([{"type": "one", "does": "refuses"}])));
        let network = plugins.open().await;
        let mut pod = pod(1);
        pod.attached = Some(network.setup(&pod).await.expect("a network"));
        let refused = network.teardown(&pod).await.expect_err("refused").to_string();
        assert_eq!(refused, "plugin type=\"one\" failed (del): not now");
        assert!(network.namespace_file(&pod.id).is_file());
        script(&plugins.directory.join("one"), "#!/bin/sh\nexit 0\n");
        network.teardown(&pod).await.expect("taken down");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn readiness_follows_the_configuration() {
    on_a_machine("readiness_follows_the_configuration", async |machine| {
        let mut plugins = Plugins::new(&machine);
        let directory = plugins.settings.cni_directory.display().to_string();
        plugins.settings.wanted = berth_runtime::network::ConfiguredMode::Cni;
        let network = plugins.open().await;
        let watched = network.clone();
        let _watchers = tokio::spawn(async move { watched.run_watchers(Default::default()).await });
        let becomes = async |expected: Result<(), String>| {
            let begun = Instant::now();
            loop {
                let status = network.status().await;
                if status == expected {
                    break;
                }
                assert!(begun.elapsed() < LIMIT, "{status:?} for {expected:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let error = |text: &str| Err(text.to_owned());
        let none = format!("no network config found in {directory}: cni plugin not initialized");
        becomes(error(&none)).await;
        plugins.configure("20-net.conf", &json!({"name": "net", "cniVersion": "1.0.0", "type": "one"}));
        becomes(Ok(())).await;
        plugins.configure("10-bad.conf", &json!({"name": "net"}));
        becomes(error("failed to load CNI config 10-bad.conf: network type not found in 10-bad.conf")).await;
        let unready = json!({"name": "net", "cniVersion": "1.1.0", "type": "one", "does": "unready"});
        plugins.configure("10-bad.conf", &unready);
        becomes(error("plugin type=\"one\" failed (status): no uplink")).await;
        fs::remove_dir_all(&plugins.settings.cni_directory).expect("removable");
        becomes(error(&none)).await;
    });
}

#[test]
fn unknown_pods_are_removed_at_start() {
    on_a_machine("unknown_pods_are_removed_at_start", async |machine| {
        let plugins = Plugins::new(&machine);
        plugins
            .configure("10-net.conflist", &json!({"name": "net", "cniVersion": "1.1.0", "plugins": [{"type": "one"}]}));
        let before = plugins.open().await;
        let (mut kept, stray) = (pod(1), pod(2));
        kept.attached = Some(before.setup(&kept).await.expect("a network"));
        before.setup(&stray).await.expect("a network");
        let foreign = machine.dir.path().join("results/net-foreign-eth0");
        let text = json!({"kind": "cniCacheV1", "containerId": "foreign", "config": "", "ifName": "eth0", "networkName": "net",
            "netns": "/run/netns/cni-1"});
        fs::write(&foreign, text.to_string()).expect("writable");
        drop(before);
        let after = NetworkManager::open(plugins.settings.clone()).await.expect("settings");
        assert!(after.recover(std::slice::from_ref(&kept)).await.expect("recovered").is_empty());
        assert!(after.namespace_file(&kept.id).is_file() && !after.namespace_file(&stray.id).exists());
        assert_eq!(plugins.calls(), ["GC one", "ADD one", "ADD one", "DEL one", "GC one"]);
        let collected = plugins.inputs().pop().expect("an input");
        assert_eq!(collected["cni.dev/valid-attachments"], json!([{"containerID": kept.id, "ifname": "eth0"}]));
        assert!(foreign.is_file(), "another runtime's");
        after.teardown(&kept).await.expect("taken down");
        fs::remove_file(foreign).expect("removable");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn a_pod_keeps_the_mode_it_began_with() {
    on_a_machine("a_pod_keeps_the_mode_it_began_with", async |machine| {
        let plugins = Plugins::new(&machine);
        let network = plugins.open().await;
        let watched = network.clone();
        let _watchers = tokio::spawn(async move { watched.run_watchers(Default::default()).await });
        let mut old = pod(1);
        old.attached = Some(network.setup(&old).await.expect("a network"));
        assert_eq!(old.attached.as_ref().expect("attached").mode, Mode::Builtin);
        plugins.configure("10-net.conf", &json!({"name": "net", "cniVersion": "1.0.0", "type": "one"}));
        let begun = Instant::now();
        while network.mode() != Mode::Cni {
            assert!(begun.elapsed() < LIMIT, "the file is not seen");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        network.teardown(&old).await.expect("taken down");
        assert_eq!(plugins.calls(), Vec::<String>::new());
        let mut new = pod(2);
        new.attached = Some(network.setup(&new).await.expect("a network"));
        assert_eq!(new.attached.as_ref().expect("attached").mode, Mode::Cni);
        network.teardown(&new).await.expect("taken down");
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}

#[test]
fn debians_plugins_make_a_network() {
    on_a_machine("debians_plugins_make_a_network", async |machine| {
        let programs = Path::new("/usr/lib/cni");
        if !["bridge", "host-local", "bandwidth"].iter().all(|name| programs.join(name).exists()) {
            return eprintln!("skipped: needs Debian's containernetworking-plugins");
        }
        let mut plugins = Plugins::new(&machine);
        plugins.settings.cni_programs = vec![programs.to_owned()];
        let ipam = json!({"type": "host-local", "dataDir": machine.dir.path().join("ipam"),
            "ranges": [[{"subnet": "10.8.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]});
        let bridge = json!({"type": "bridge", "bridge": "cni9", "isGateway": true, "ipMasq": false, "ipam": ipam});
        plugins.configure(
            "10-net.conflist",
            &list(&json!([bridge, {"type": "bandwidth", "capabilities": {"bandwidth": true}}])),
        );
        let network = plugins.open().await;
        let mut pods = vec![pod(1), annotated(pod(2), "kubernetes.io/ingress-bandwidth", "100M")];
        for pod in &mut pods {
            pod.attached = Some(network.setup(pod).await.expect("a network"));
        }
        serve(netns(&pods[0]), "0.0.0.0:80", "one");
        assert_eq!(ask(Some(netns(&pods[1])), "10.8.0.2:80").expect("an answer"), "one 10.8.0.3");
        for pod in &pods {
            network.teardown(pod).await.expect("taken down");
            network.teardown(pod).await.expect("twice");
        }
        assert_eq!(machine.left(), Vec::<String>::new());
    });
}
