class Walpost < Formula
  desc "Relay of a PostgreSQL outbox into NATS JetStream"
  homepage "https://github.com/walpost/walpost"
  version "{{version}}"
  license "Apache-2.0"

  on_macos do
    on_arm do
      url "https://github.com/walpost/walpost/releases/download/{{tag}}/walpost_{{version}}_darwin_arm64.tar.gz"
      sha256 "{{darwin_arm64}}"
    end
    on_intel do
      url "https://github.com/walpost/walpost/releases/download/{{tag}}/walpost_{{version}}_darwin_amd64.tar.gz"
      sha256 "{{darwin_amd64}}"
    end
  end

  on_linux do
    on_arm do
      url "https://github.com/walpost/walpost/releases/download/{{tag}}/walpost_{{version}}_linux_arm64.tar.gz"
      sha256 "{{linux_arm64}}"
    end
    on_intel do
      url "https://github.com/walpost/walpost/releases/download/{{tag}}/walpost_{{version}}_linux_amd64.tar.gz"
      sha256 "{{linux_amd64}}"
    end
  end

  def install
    bin.install "walpost"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/walpost.bash" => "walpost"
    zsh_completion.install "completions/_walpost"
    fish_completion.install "completions/walpost.fish"
    pkgshare.install "grants.sql"
    (etc/"walpost").install "walpost.example.yaml" => "walpost.yaml"
  end

  service do
    run [opt_bin/"walpost", "run", "--config", etc/"walpost/walpost.yaml"]
    keep_alive successful_exit: false
    log_path var/"log/walpost.log"
    error_log_path var/"log/walpost.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/walpost version")
  end
end
