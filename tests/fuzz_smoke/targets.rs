//! One target per parser of foreign bytes: what must hold whatever the bytes are.
//!
//! The only copy of each target: `fuzz/` runs it under a coverage-guided fuzzer, `main.rs` beside
//! this file on a small corpus and seeded mutations. A target panics where something is wrong:
//! the parser panicked, what it read is not what it writes, or an answer has no bound. Time and
//! size are watched by who runs it.
#![allow(dead_code, reason = "each fuzz program uses one target")]

use std::{borrow::Cow, collections::BTreeMap, ffi::OsString, io, os::unix::ffi::OsStringExt, sync::LazyLock};

use berth::{
    config::{self, FeatureGates, GoDuration, HostFacts, KubeletConfiguration, Personality, flags},
    cri::socket_path,
    embedded::{
        images::{apply::path, compression::Unpacked, tar::reader::Reader},
        launch::{ImageConfig, users},
        seccomp::{Conditions, Machine, Profile, compile},
        shim::{
            exit_record::ExitRecord,
            plan,
            wire::{self, Datagram},
            worker::record::{Splitter, Tag},
        },
    },
    images::{
        credentials::{docker, glob, hash, plugin_answer, plugin_config},
        record, reference,
    },
    logs::{self, Filter, Head, LogOptions, LogStreams, Stamp, Stream},
    node::CpuSet,
    pleg::{containerd_events, convert},
    pod::{
        Pod, PodSource, api, env, env_file, expand,
        fieldpath::{self, Whereabouts},
        hash::fnv1a_32,
        hostname::HostName,
        qos::Qos,
        quantity::{Amount, Format},
        resource_state,
        resources::{self, Overhead},
    },
    proto::{containerd_events::Envelope, cri},
    runtime::request::{container, dns, hosts, ports},
    server::routes::log_query::NodeLogQuery,
    server::streaming::{
        spdy::{
            StreamId,
            frames::{CHUNK, Decoder, Event},
        },
        websocket::{
            self,
            channels::{self, Said},
        },
    },
    sources::{
        decode::{self, Manifest},
        defaults,
        normalise::{self, Origin},
        references::ReferenceRule,
    },
    stats::{cgroup_files as control, filesystems, host, network},
    sys::mount_table,
};
use bytes::{Bytes, BytesMut};
use prost::Message;
use tokio_tungstenite::tungstenite::{WebSocket, protocol::Role};

/// A target: bytes in, a panic where something is wrong.
pub type Target = fn(&[u8]);

/// All targets; names are those of the programs in `fuzz/` and of the corpus folders.
pub const TARGETS: &[(&str, Target)] = &[
    ("cgroup_files", cgroup_files),
    ("command_line", command_line),
    ("containerd_event", containerd_event),
    ("cpu_set", cpu_set),
    ("cri_endpoint", cri_endpoint),
    ("cri_status", cri_status),
    ("docker_config", docker_config),
    ("env_file", env_file),
    ("expansion", expansion),
    ("field_path", field_path),
    ("filter_profile", filter_profile),
    ("go_duration", go_duration),
    ("host_names", host_names),
    ("image_pattern", image_pattern),
    ("image_reference", image_reference),
    ("image_users", image_users),
    ("kubelet_config", kubelet_config),
    ("kubelet_dropin", kubelet_dropin),
    ("layer_entries", layer_entries),
    ("log_cri", log_cri),
    ("log_docker", log_docker),
    ("log_filter", log_filter),
    ("log_query", log_query),
    ("manifest_file", manifest_file),
    ("manifest_http", manifest_http),
    ("mount_table", mounts),
    ("plugin_config", plugins),
    ("plugin_response", plugin_response),
    ("pull_record", pull_record),
    ("quantity", quantity),
    ("resolv_conf", resolv_conf),
    ("resource_state", resources_on_disk),
    ("shim_exit_record", shim_exit_record),
    ("shim_message", shim_message),
    ("shim_output", shim_output),
    ("spdy_frames", spdy_frames),
    ("websocket_tunnel", websocket_tunnel),
];

fn text(data: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(data)
}

/// The first line, and the rest.
fn first_line(data: &[u8]) -> (Cow<'_, str>, &[u8]) {
    let end = data.iter().position(|b| *b == b'\n').unwrap_or(data.len());
    let (line, rest) = data.split_at(end);
    (text(line), rest.get(1..).unwrap_or_default())
}

static POD: LazyLock<Pod> = LazyLock::new(|| {
    let pod = serde_json::json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u-1", "labels": {"app": "web", "x": "a\"b"},
            "annotations": {"example.com/Note": "two\nlines"}},
        "spec": {"restartPolicy": "Always", "enableServiceLinks": true, "containers": [
            {"name": "main", "image": "web:1", "resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}}},
            {"name": "side", "image": "side"}]},
    });
    Pod::new(serde_json::from_value(pod).expect("an API object")).expect("a pod")
});

/// The kernel's files behind statistics: control groups, network interfaces, disks, mounts.
pub fn cgroup_files(data: &[u8]) {
    let _ = (control::number(data), control::signed(data), control::cpu_max(data), control::oom_kills(data));
    let _ = (control::cpu_stat(data), control::cpu_stat_v1(data), control::cpuacct_stat(data));
    let _ = (control::memory_stat(data), control::memory_stat_v1(data));
    if let Some(stalls) = control::pressure(data) {
        for line in [stalls.some, stalls.full] {
            assert!([line.avg10, line.avg60, line.avg300].iter().all(|share| share.is_finite()), "{line:?}");
        }
    }
    assert!(control::io_stat(data).len() <= 256 && control::blkio(data, data).len() <= 256);
    assert!(control::processes(data).all(|pid| pid != 0));
    let table = text(data);
    assert!(network::interfaces(&table).len() <= 256);
    let _ = (network::default_interface(&table), host::parse_disks(&table));
    assert!(filesystems::places(&table, &["/hidden"]).len() <= 256);
}

/// A manifest in a directory.
pub fn manifest_file(data: &[u8]) {
    let origin = Origin {
        source: PodSource::File,
        location: "/etc/manifests/web.yaml",
        node_name: "Node-1",
        references: ReferenceRule::RefuseAll,
    };
    match decode::decode(data) {
        Ok(Manifest::Pod(pod)) => become_static(*pod, origin),
        Ok(Manifest::List(_)) => {}
        Err(error) => drop(error.to_string()),
    }
}

/// The answer of a manifest server: one pod or a list.
pub fn manifest_http(data: &[u8]) {
    let origin = Origin {
        source: PodSource::Http,
        location: "http://manifests/pods",
        node_name: "node-1",
        references: ReferenceRule::RefuseUnusable,
    };
    match decode::decode(data) {
        Ok(Manifest::Pod(pod)) => become_static(*pod, origin),
        Ok(Manifest::List(pods)) => pods.into_iter().for_each(|pod| become_static(pod, origin)),
        Err(error) => drop(error.to_string()),
    }
}

/// What a manifest decodes to is written and read again unchanged, defaults are filled in once,
/// and what is accepted is a pod that every later stage can work with.
fn become_static(pod: api::Pod, origin: Origin<'_>) {
    let mut defaulted = pod.clone();
    defaults::apply(&mut defaulted);
    let mut again = defaulted.clone();
    defaults::apply(&mut again);
    assert_eq!(defaulted, again, "defaults are idempotent");
    let made = match normalise::static_pod(pod.clone(), origin) {
        Ok(made) => made,
        Err(error) => return drop(error.to_string()),
    };
    assert_eq!(normalise::static_pod(pod, origin).as_ref(), Ok(&made), "the same bytes make the same pod");
    let written = serde_json::to_vec(&made).expect("API objects serialise");
    match decode::decode(&written) {
        Ok(Manifest::Pod(read)) => assert_eq!(*read, made, "written and read"),
        other => panic!("{other:?} from {}", text(&written)),
    }
    serve(&Pod::new(made).expect("an accepted pod has identity and specification"));
}

/// The pure stages behind admission.
fn serve(pod: &Pod) {
    drop((Qos::of(pod), ports::of_pod(pod), container::pod_labels(pod)));
    drop((
        resources::pod_requests(pod.spec(), Overhead::Included),
        resources::pod_limits(pod.spec(), Overhead::Included),
    ));
    bounded_dns(pod, None);
    if let Ok(name) = HostName::of(pod, "cluster.local") {
        assert!(name.name.len() <= 63 && name.kernel_name(true).map_or(0, |n| n.len()) <= 64);
    }
    let state = resource_state::PodResources::of(pod);
    assert!(!state.differs_from(pod) && state.applied_to(pod).is_none());
    pod.containers().iter().for_each(|one| drop(env::references(one)));
}

/// The main file of the agent's configuration.
pub fn kubelet_config(data: &[u8]) {
    let gates = FeatureGates::new();
    let Ok((config, _)) = config::decode::main_file(&text(data), "/etc/k", &gates) else { return };
    judge(&config);
    let mut written = config::configz::to_json(&config);
    let fields = written.as_object_mut().expect("an object");
    fields.insert("kind".to_owned(), config::fields::KIND.into());
    fields.insert("apiVersion".to_owned(), config::fields::API_VERSION.into());
    let (again, notices) =
        config::decode::main_file(&written.to_string(), "/etc/k", &gates).expect("what we write, we read");
    assert!(notices.is_empty(), "{notices:?}");
    assert_eq!(again, config, "written and read");
}

fn judge(config: &KubeletConfiguration) {
    let mut gates = FeatureGates::new();
    drop(gates.set_from_map(&config.feature_gates));
    drop(config::validate::validate(config, &gates, &HostFacts::default()));
    drop(config::validate::log_settings(config, &gates));
    drop(config::reservations(config, &HostFacts::default()));
    drop(config::configz::masked(config));
}

/// Drop-ins, separated by lines of `%%`.
pub fn kubelet_dropin(data: &[u8]) {
    let (base, gates) = (config::defaults::defaults(), FeatureGates::new());
    let all = text(data);
    let files: Vec<&str> = all.split("\n%%\n").collect();
    let merged = |files: &[&str]| {
        let texts = files.iter().map(|text| ("/d/x.conf".to_owned(), Ok((*text).to_owned())));
        config::dropins::merge_texts(&base, "/d", texts, &gates).map(|(config, _)| config)
    };
    let Ok(config) = merged(&files) else { return };
    judge(&config);
    if let Some(last) = files.last() {
        let twice: Vec<&str> = files.iter().chain([last]).copied().collect();
        assert_eq!(merged(&twice).as_ref(), Ok(&config), "merging the last one again changes nothing");
    }
}

/// The head of a CRI log line.
pub fn log_cri(data: &[u8]) {
    let Head::Parsed(whole) = logs::head(data) else { return };
    assert!(whole.content <= data.len());
    check_stamp(whole.time);
    for end in 0..whole.content {
        let before = logs::head(data.get(..end).expect("content is within the line"));
        assert!(before == Head::Incomplete, "{before:?} of the first {end} bytes");
    }
}

fn check_stamp(stamp: Stamp<'_>) {
    let mut out = Vec::new();
    stamp.write(&mut out);
    let written = String::from_utf8(out).expect("times are text");
    assert_eq!(Stamp::parse(&written).map(|s| s.nanos()), Some(stamp.nanos()), "{written}");
    assert!(written.len() <= 40);
}

/// A line of docker's `json-file` driver.
pub fn log_docker(data: &[u8]) {
    let Ok(line) = logs::docker(data) else { return };
    let (stamp, _) = line.origin().expect("a line that was read has an origin");
    check_stamp(stamp);
    assert!(line.log.len() <= data.len() * 3);
}

/// A whole log file; the first bytes say what is wanted of it.
pub fn log_filter(data: &[u8]) {
    let Some(([wishes, cut], log)) = data.split_first_chunk::<2>() else { return };
    let options = LogOptions {
        tail: (wishes & 1 != 0).then_some(u64::from(wishes >> 5)),
        since: (wishes & 2 != 0).then_some(jiff::Timestamp::UNIX_EPOCH),
        limit_bytes: (wishes & 4 != 0).then_some(u64::from(*cut) * 3),
        timestamps: wishes & 8 != 0,
        streams: if wishes & 16 != 0 { LogStreams::Only(Stream::Stderr) } else { LogStreams::All },
        follow: false,
    };
    let read = |size: usize| {
        let (mut filter, mut out) = (Filter::new(&options), Vec::new());
        let result = log.chunks(size).try_for_each(|piece| filter.push(piece, &mut out));
        result.and_then(|()| filter.finish(&mut out)).map(|()| out).map_err(drop)
    };
    let (whole, pieces) = (read(log.len().max(1)), read(usize::from(*cut) + 1));
    assert_eq!(whole, pieces, "the size of the pieces does not matter");
    if let (Ok(out), Some(limit)) = (&whole, options.limit_bytes) {
        assert!(out.len() as u64 <= limit);
    }
}

/// The query of `/logs/`: what is let through is safe as arguments of `journalctl`.
pub fn log_query(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let query = match NodeLogQuery::parse(text) {
        Ok(Some(query)) => query,
        Ok(None) => return,
        Err(told) => return assert!(told.len() <= 16 * text.len() + 1024, "{} bytes of complaints", told.len()),
    };
    if query.validate(None).is_err() {
        return;
    }
    assert!(query.services.len() <= 4 && query.files.len() <= 1);
    let services: Vec<&str> = query.services.iter().map(String::as_str).collect();
    for service in &services {
        assert!(service.len() <= 256 && service.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:@-".contains(&b)));
    }
    let arguments = query.journal_arguments(&services);
    let is_known =
        |argument: &String| argument.starts_with("--") || argument.parse::<i64>().is_ok_and(|boot| boot <= 0);
    assert!(arguments.iter().all(is_known), "{arguments:?}");
}

/// The name of an image.
pub fn image_reference(data: &[u8]) {
    let text = text(data);
    let Ok((tagged, parsed)) = reference::with_default_tag(&text) else { return };
    let canonical = parsed.canonical();
    let again = reference::Reference::parse(&canonical).expect("the canonical form is a reference");
    assert_eq!(again.canonical(), canonical);
    assert_eq!((&again.repository, &again.digest), (&parsed.repository, &parsed.digest));
    assert_eq!(reference::Reference::parse(&tagged).map(|r| r.canonical()), Ok(canonical));
}

/// A layer of an image: unpacked, walked, its names taken apart.
pub fn layer_entries(data: &[u8]) {
    let Ok(unpacked) = Unpacked::new(data) else { return };
    let mut reader = Reader::new(io::Read::take(unpacked, 1 << 20));
    let mut entries = 0;
    while let Ok(Some(entry)) = reader.next_entry() {
        entries += 1;
        assert!(entries <= (1 << 20) / 512, "more entries than headers");
        if let Ok(parts) = path::parts(&entry.name) {
            assert!(parts.iter().all(|part| !matches!(*part, b"" | b"." | b"..") && !part.contains(&b'/')));
        }
        if let Some(map) = &entry.sparse {
            assert_eq!(map.pieces.iter().map(|(_, length)| length).sum::<u64>(), entry.size);
        }
    }
}

/// Docker's configuration, in both forms.
pub fn docker_config(data: &[u8]) {
    for logins in [docker::parse_config_json(data), docker::parse_dockercfg(data)].into_iter().flatten() {
        let mut ring = docker::Keyring::default();
        ring.add(&logins, &());
        for image in ["docker.io/library/busybox", "registry.example.com:5000/team/app", "quay.io/x/y"] {
            assert!(ring.find(image).len() <= logins.len());
        }
        for login in logins.values() {
            assert_eq!(hash::credential_hash(login).len(), 64);
        }
        let entry = |login: &docker::Login| serde_json::json!({"username": login.username, "password": login.password, "email": login.email});
        let entries: BTreeMap<&String, serde_json::Value> = logins.iter().map(|(k, v)| (k, entry(v))).collect();
        let written = serde_json::to_vec(&serde_json::json!({ "auths": entries })).expect("texts serialise");
        assert_eq!(docker::parse_config_json(&written), Ok(logins), "written and read");
    }
}

/// A pattern of registries, and on the second line an image.
pub fn image_pattern(data: &[u8]) {
    let (pattern, image) = first_line(data);
    let image = text(image);
    glob::matches(&pattern, &image);
    if !image.contains(['*', '?', '[', '\\']) {
        assert!(glob::matches(&image, &image), "a name without wildcards covers itself");
    }
}

/// The configuration of credential plugins; files are separated by lines of `%%`.
pub fn plugins(data: &[u8]) {
    let files: Vec<String> = text(data).split("\n%%\n").map(str::to_owned).collect();
    let Ok(providers) = plugin_config::load(&files) else { return };
    assert!(!providers.is_empty());
    for provider in providers {
        assert!(!provider.name.contains('/') && !matches!(provider.name.as_str(), "" | "." | ".."), "a file name");
        assert!(!provider.match_images.is_empty());
    }
}

/// What a credential plugin prints.
pub fn plugin_response(data: &[u8]) {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    match plugin_answer::parse(version, data) {
        Ok(answer) => drop(answer.logins),
        Err(error) => assert!(error.to_string().len() < 256, "nothing of an answer is told"),
    }
}

/// A file of the image manager's records.
pub fn pull_record(data: &[u8]) {
    if let Ok(intent) = record::decode_intent(data) {
        let again = record::decode_intent(&record::encode_intent(&intent.value)).expect("what we write, we read");
        assert_eq!((again.value, again.outdated), (intent.value, false));
    }
    if let Ok(pulled) = record::decode_pulled(data) {
        let written = record::encode_pulled(&pulled.value);
        let again = record::decode_pulled(&written).expect("what we write, we read");
        assert!(!again.outdated);
        assert_eq!(record::encode_pulled(&again.value), written);
        for mut grants in pulled.value.grants.into_values() {
            grants.add(&record::Proof::Node);
            assert!(grants.node && grants.secrets.is_empty() && grants.accounts.is_empty());
        }
    }
}

/// `allocated_pods_state` and `actuated_pods_state`, as a whole file and as the content of a
/// sound one.
pub fn resources_on_disk(data: &[u8]) {
    let content = text(data);
    let checksum = fnv1a_32(format!("(string){content}").as_bytes());
    let sound = serde_json::json!({"data": content, "checksum": checksum}).to_string();
    for file in [data, sound.as_bytes()] {
        let Ok(entries) = resource_state::decode(file) else { continue };
        assert_eq!(resource_state::decode(&resource_state::encode(&entries)).as_ref(), Ok(&entries));
        for entry in entries.values() {
            if let Some(spec) = entry.applied_to(&POD) {
                let applied = POD.with_spec(spec);
                assert!(!entry.differs_from(&applied), "what was applied differs no more");
            }
        }
    }
}

/// The node's resolv.conf.
pub fn resolv_conf(data: &[u8]) {
    let Ok(host) = dns::parse(&text(data)) else { return };
    drop(dns::check_host_file("/etc/resolv.conf", &host, "cluster.local"));
    bounded_dns(&POD, Some(&host));
}

fn bounded_dns(pod: &Pod, host: Option<&dns::HostDns>) {
    let settings = dns::DnsSettings {
        cluster_dns: vec!["10.0.0.10".to_owned()],
        cluster_domain: "cluster.local".to_owned(),
        loopback: Vec::new(),
    };
    for settings in [settings, dns::DnsSettings::default()] {
        let dns = dns::of_pod(pod, &settings, host).config;
        assert!(dns.servers.len() <= 3 && dns.searches.len() <= 32 && dns.searches.join(" ").len() <= 2048);
    }
}

/// An env file; its first line is the key that is looked up.
pub fn env_file(data: &[u8]) {
    let (key, file) = first_line(data);
    let Ok(Some(value)) = env_file::lookup(&text(file), &key) else { return };
    assert!(!value.contains('\''));
    assert_eq!(env_file::lookup(&format!("{key}='{value}'\n"), &key), Ok(Some(value)), "written and read");
}

/// A text with `$(NAME)`, after lines of `NAME=text` that refer to those before them.
pub fn expansion(data: &[u8]) {
    let all = text(data);
    let entry = |line: &str| {
        let (name, value) = line.split_once('=').unwrap_or(("LAST", line));
        api::EnvVar { name: name.to_owned(), value: Some(value.to_owned()), value_from: None }
    };
    let variables: Vec<api::EnvVar> = all.lines().map(entry).collect();
    let own = api::Container { env: Some(variables), ..Default::default() };
    let inputs = env::EnvInputs {
        namespace: "shop",
        devices: &[],
        service_links: Some(false),
        services: Some(&[]),
        config_maps: &Default::default(),
        secrets: &Default::default(),
        files: &Default::default(),
        field: &|_| Err(String::new()),
        resource: &|_| Err(String::new()),
    };
    let Ok(env) = env::build(&own, &inputs) else { return };
    let size: usize = env.iter().map(|(name, value)| name.len() + value.len()).sum();
    assert!(size <= data.len() * 3 + (32 << 20), "{size} bytes of environment");
    let variables = expand::Variables::new(env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let args: Vec<String> = all.lines().map(str::to_owned).collect();
    let size: usize = variables.expand_all(&args).iter().flatten().map(String::len).sum();
    assert!(size <= data.len() * 3 + (32 << 20), "{size} bytes of arguments");
    drop(all.lines().next().map(|line| variables.expand_sub_path(line)));
}

/// A quantity.
pub fn quantity(data: &[u8]) {
    let Ok(amount) = Amount::parse(&text(data)) else { return };
    let canonical = amount.canonical();
    let again = Amount::parse(&canonical).unwrap_or_else(|e| panic!("{canonical}: {e}"));
    assert_eq!(again, amount, "{canonical}");
    assert_eq!(again.canonical(), canonical);
    let rounded = amount.rounded_to_milli();
    assert!(rounded >= amount && rounded.rounded_to_milli() == rounded);
    if !amount.is_negative() {
        assert!(Amount::from_value(amount.value(), Format::DecimalSi) >= amount);
    }
    assert!(amount.plus(amount) >= amount || amount.is_negative());
    assert!(amount.minus(amount).is_zero());
    drop((amount.milli(), amount.plus(amount).canonical(), amount.plus(amount).value()));
}

/// A duration.
pub fn go_duration(data: &[u8]) {
    let Ok(duration) = text(data).parse::<GoDuration>() else { return };
    assert_eq!(duration.to_string().parse(), Ok(duration), "{duration}");
    assert_eq!(duration.std().as_nanos(), u128::try_from(duration.nanos()).unwrap_or(0));
}

/// The words of a command line, each on a line.
pub fn command_line(data: &[u8]) {
    let args: Vec<OsString> = data.split(|b| *b == b'\n').map(|word| OsString::from_vec(word.to_vec())).collect();
    let mut settings = flags::Settings { config: config::defaults::defaults(), ..Default::default() };
    let parsed = flags::parse(&args, &mut settings);
    drop(flags::values(&settings));
    if parsed.is_ok() && settings.flags.config.is_empty() && settings.flags.config_dir.is_empty() {
        drop(config::load(Personality::Kubelet, &args, &HostFacts::default()));
    }
}

/// Lines: a field path, a resource, a divisor.
pub fn field_path(data: &[u8]) {
    let (path, rest) = first_line(data);
    let (resource, divisor) = first_line(rest);
    let selector = api::ObjectFieldSelector { field_path: path.clone().into_owned(), api_version: None };
    let at = Whereabouts { node_name: "node-1", host_ips: &[], pod_ips: &[] };
    let as_variable = fieldpath::env_field(&POD, &selector, at);
    let as_file = fieldpath::volume_field(&POD, &path);
    if let (Ok(variable), Ok(file)) = (&as_variable, &as_file) {
        assert_eq!(variable, file);
    }
    let divisor = text(divisor);
    let selector = api::ResourceFieldSelector {
        resource: resource.into_owned(),
        container_name: Some("main".to_owned()),
        divisor: (!divisor.is_empty()).then(|| serde_json::from_value(divisor.into()).expect("a text")),
    };
    if let Ok(value) = fieldpath::resource_value(&POD, &selector, None, &BTreeMap::new()) {
        assert!(value.parse::<i64>().is_ok(), "{value}");
    }
}

/// A profile of system calls: what it becomes is a program the kernel takes.
pub fn filter_profile(data: &[u8]) {
    let Ok(profile) = Profile::parse(data) else { return };
    for machine in [Machine::X86_64, Machine::Aarch64, Machine::Riscv64] {
        let on = Conditions { machine, capabilities: vec!["SYS_ADMIN"], kernel: (6, 1), has_spec_allow: true };
        let Ok(filter) = compile(&profile, &on) else { continue };
        let program = &filter.instructions;
        assert!((1..=4096).contains(&program.len()) && filter.bytes().len() == program.len() * 8);
        for (at, i) in program.iter().enumerate() {
            let farthest = match i.code {
                0x06 => continue, // returns
                0x05 => i.k as usize,
                _ => usize::from(i.jump_true.max(i.jump_false)),
            };
            assert!(at + 1 + farthest < program.len(), "{i:?} at {at} leaves the program");
        }
    }
}

/// A line with an image's user, and its accounts; the same text serves as both files.
pub fn image_users(data: &[u8]) {
    let (user, rest) = first_line(data);
    let image =
        ImageConfig { user: user.into_owned(), passwd: rest.to_vec(), group: rest.to_vec(), ..Default::default() };
    let Ok(who) = users::identity(&cri::LinuxContainerSecurityContext::default(), &image, &[]) else { return };
    assert!(who.uid <= i32::MAX as u32 && who.groups.iter().all(|gid| *gid <= i32::MAX as u32));
    assert!(who.groups.is_sorted() && who.groups.contains(&who.gid));
    assert!(who.groups.windows(2).all(|pair| pair[0] < pair[1]));
}

/// Lines: host name, subdomain, cluster domain; the rest is the node's hosts file.
pub fn host_names(data: &[u8]) {
    let (name, rest) = first_line(data);
    let (subdomain, rest) = first_line(rest);
    let (domain, node_file) = first_line(rest);
    let spec = api::PodSpec {
        hostname: Some(name.clone().into_owned()),
        subdomain: Some(subdomain.into_owned()),
        ..POD.spec().clone()
    };
    let alias = api::HostAlias { ip: name.into_owned(), hostnames: Some(vec![domain.clone().into_owned()]) };
    let aliases = std::slice::from_ref(&alias);
    assert!(
        hosts::of_node(node_file, aliases).windows(node_file.len().max(1)).any(|w| w == node_file)
            || node_file.is_empty()
    );
    let Ok(found) = HostName::of(&POD.with_spec(spec), &domain) else { return };
    assert!(!found.name.is_empty() && found.name.len() <= 63);
    if let Ok(name) = found.kernel_name(true) {
        assert!(name.len() <= 64);
    }
    assert!(hosts::of_pod(&found, &[[10, 0, 0, 1].into()], aliases).starts_with("# Kubernetes-managed hosts file"));
}

/// An event of containerd: as a whole, and as the body of an event that counts.
pub fn containerd_event(data: &[u8]) {
    if let Ok(envelope) = Envelope::decode(data) {
        drop(containerd_events::hint(&envelope));
    }
    for topic in ["/tasks/exit", "/tasks/delete", "/containers/create", "/containers/delete"] {
        let event = prost_types::Any { type_url: String::new(), value: data.to_vec() };
        let envelope = Envelope {
            timestamp: Some(prost_types::Timestamp { seconds: i64::MAX, nanos: i32::MIN }),
            namespace: "k8s.io".to_owned(),
            topic: topic.to_owned(),
            event: Some(event),
        };
        if let Some(hint) = containerd_events::hint(&envelope) {
            assert!(!hint.object.is_empty() && hint.object.len() <= data.len());
        }
    }
}

/// Answers of the runtime about one object.
pub fn cri_status(data: &[u8]) {
    let listed = cri::Container::decode(data).unwrap_or_default();
    drop((convert::listed_container(&listed), convert::pod_of_container(&listed)));
    if let Ok(status) = cri::ContainerStatus::decode(data) {
        drop(convert::container(&listed, &status));
        drop(convert::exit(&status));
    }
    if let Ok(sandbox) = cri::PodSandbox::decode(data) {
        drop((convert::listed_sandbox(&sandbox), convert::pod_of_sandbox(&sandbox)));
    }
    if let Ok(status) = cri::PodSandboxStatus::decode(data) {
        drop(convert::sandbox(&status));
    }
}

/// A set of CPUs.
pub fn cpu_set(data: &[u8]) {
    let text = text(data);
    drop(config::validate::cpus::parse(&text));
    let Ok(set) = CpuSet::parse(&text) else { return };
    assert_eq!(CpuSet::parse(&set.to_string()).as_ref(), Ok(&set), "written and read");
    assert!(set.is_subset(&set) && set.iter().count() == set.len());
}

/// An endpoint of the runtime.
pub fn cri_endpoint(data: &[u8]) {
    if let Ok(path) = socket_path(&text(data)) {
        assert!(!path.as_os_str().is_empty());
    }
}

/// `/proc/self/mountinfo`.
pub fn mounts(data: &[u8]) {
    let found = mount_table::parse(data);
    assert!(found.len() <= data.split(|b| *b == b'\n').count());
}

/// How a container ended, from a file that another version may have written.
pub fn shim_exit_record(data: &[u8]) {
    if let Some(record) = ExitRecord::parse(data) {
        assert_eq!(ExitRecord::parse(record.text().as_bytes()), Some(record));
    }
}

/// A datagram between a daemon and a shim of another version: what is understood is written as it was meant.
pub fn shim_message(data: &[u8]) {
    fn body<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq>(read: &Datagram<'_>) {
        let Ok(value) = read.body::<T>() else { return };
        // What was short may be long when written in full; it is refused then.
        let Ok(bytes) = wire::write(read.kind, read.sequence, &value) else { return };
        let again = Datagram::read(&bytes).expect("ours");
        assert!((again.kind, again.sequence) == (read.kind, read.sequence));
        assert!(again.body::<T>().is_ok_and(|again| again == value), "another value");
    }
    let Ok(read) = Datagram::read(data) else { return };
    match read.kind {
        wire::Kind::Request => body::<plan::Request>(&read),
        wire::Kind::Reply => body::<plan::Reply>(&read),
        wire::Kind::Event => body::<plan::Event>(&read),
    }
}

/// What a container writes: records do not depend on how it was read, and nothing is lost. First byte: the longest.
pub fn shim_output(data: &[u8]) {
    let Some((longest, data)) = data.split_first() else { return };
    let longest = usize::from(*longest).max(1);
    let read = |piece: usize| {
        let (mut splitter, mut records) = (Splitter::new(longest), Vec::new());
        data.chunks(piece)
            .for_each(|chunk| splitter.feed(chunk, &mut |tag, record| records.push((tag, record.to_vec()))));
        splitter.finish(&mut |tag, record| records.push((tag, record.to_vec())));
        records
    };
    let records = read(data.len().max(1));
    assert!(read(7) == records, "it depends on how it was read");
    assert!(records.iter().all(|(_, record)| record.len() <= longest));
    let lines = records.iter().filter(|(tag, _)| *tag == Tag::Full).count();
    assert_eq!(lines, data.iter().filter(|byte| **byte == b'\n').count());
    let kept: usize = records.iter().map(|(_, record)| record.len()).sum();
    assert!(kept + 2 * lines >= data.len(), "only ends of lines are left out");
}

/// SPDY frames from a peer: what is read does not depend on how the bytes were cut.
pub fn spdy_frames(data: &[u8]) {
    let read = |piece: usize| {
        let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
        let (mut events, mut payload) = (Vec::new(), BTreeMap::<StreamId, Vec<u8>>::new());
        for bytes in data.chunks(piece.max(1)) {
            input.extend_from_slice(bytes);
            loop {
                match decoder.decode(&mut input) {
                    Ok(Some(Event::Data { stream, bytes, fin })) => {
                        assert!(bytes.len() <= CHUNK && stream != 0);
                        payload.entry(stream).or_default().extend_from_slice(&bytes);
                        if fin {
                            events.push(Event::Data { stream, bytes: Bytes::new(), fin });
                        }
                    }
                    Ok(Some(event)) => {
                        if let Event::SynStream { headers, .. } = &event {
                            assert!(headers.len() <= 64);
                        }
                        events.push(event);
                    }
                    Ok(None) => break,
                    Err(error) => return (events, payload, Some(error)),
                }
            }
        }
        (events, payload, None)
    };
    assert_eq!(read(data.len()), read(7));
}

/// What a client may put on a WebSocket that ends here: channel messages, or SPDY in pieces.
pub fn websocket_tunnel(data: &[u8]) {
    struct Client<'a>(&'a [u8]);
    impl io::Read for Client<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl io::Write for Client<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut socket = WebSocket::from_raw_socket(Client(data), Role::Server, Some(websocket::limits()));
    let (mut decoder, mut tunnelled, mut is_spdy) = (Decoder::default(), BytesMut::new(), true);
    while let Ok(message) = socket.read() {
        if message.is_close() {
            break; // its reason may be the codec's own
        }
        let bytes = message.into_data();
        assert!(bytes.len() <= data.len(), "nobody sent that much");
        tunnelled.extend_from_slice(&bytes);
        while is_spdy {
            match decoder.decode(&mut tunnelled) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => is_spdy = false,
            }
        }
        if let Ok(Said::Stdin(said) | Said::Resize(said)) = channels::read(bytes.clone()) {
            assert_eq!(said.len() + 1, bytes.len());
        }
    }
}
