# Runs the `install` and `test` blocks of a formula without Homebrew: ruby deploy/run_formula.rb FORMULA FOLDER
# It replaces the few words of Homebrew that the formula uses. Any python3 takes the place of Homebrew's.
require "digest"
require "pathname"
require "tmpdir"
require "uri"

class Pathname
  def install_symlink(target)
    mkpath
    (self/target.basename).make_symlink(target)
  end
end

class Formula
  class << self
    attr_reader :test_block

    %w[desc url version sha256 license].each do |word|
      define_method(word) { |value = nil| value ? instance_variable_set("@#{word}", value) : instance_variable_get("@#{word}") }
    end

    def depends_on(name) = puts("depends on #{name}")
    def service(&block) = block
    def test(&block) = @test_block = block

    def [](name)
      folder = Pathname.new(Dir.mktmpdir)
      python = folder/name.sub("@", "")
      python.write("#!/bin/sh\nexec python3 \"$@\"\n")
      python.chmod(0o755)
      Struct.new(:opt_bin).new(folder)
    end
  end

  attr_reader :buildpath, :libexec, :bin

  def initialize(folder)
    @buildpath, @libexec, @bin = folder/"build", folder/"libexec", folder/"bin"
    @buildpath.mkpath
  end

  def version = self.class.version
  def system(*words) = Kernel.system(*words.map(&:to_s)) || abort("failed: #{words.join(" ")}")
  def shell_output(command) = `#{command}`
  def assert_match(wanted, text) = text.include?(wanted) || abort("#{wanted.inspect} is not in #{text.inspect}")

  def run
    archive = URI(self.class.url).path
    abort "the checksum is wrong" unless Digest::SHA256.file(archive).hexdigest == self.class.sha256
    system "tar", "-xzf", archive, "--strip-components=1", "-C", buildpath
    Dir.chdir(buildpath) { install }
    instance_exec(&self.class.test_block)
    puts "installed and tested: #{bin/"outrider"}"
  end
end

load File.expand_path(ARGV.fetch(0))
Outrider.new(Pathname.new(File.expand_path(ARGV.fetch(1)))).run
